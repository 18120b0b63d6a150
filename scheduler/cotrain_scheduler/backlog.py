"""What one tenant has waiting, taken from its runs in turn: ops, and at last parts of passes. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cotrain_scheduler.fair_queue import PlannedPart
from cotrain_store.messages.ops import PASSES, OpKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cotrain_store.messages.ids import RequestId
    from cotrain_store.messages.ops import QueuedOp, RunQueue

#: These run last in a cycle, in order…
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: … and after one of these a cycle takes nothing else of their run.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)
#: Saves and loads of one run in a cycle. They have no tokens, so that no budget bounds them: sixty loads in
#: flight would be a cycle of sixty times a whole state read, all of it in memory at once.
MOST = {OpKind.SAVE: 4, OpKind.LOAD: 1}


def runnable_prefix(ops: Iterable[QueuedOp], *, takes_saves: bool = True) -> list[QueuedOp]:
    """Take the ops of one run that one cycle may hold."""
    prefix: list[QueuedOp] = []
    takes_only_tail = False
    left = {**MOST, OpKind.SAVE: MOST[OpKind.SAVE] if takes_saves else 0}
    for op in ops:
        if op.kind in left:
            if not left[op.kind]:
                break
            left[op.kind] -= 1
        if op.kind is not OpKind.REJECTED:
            if takes_only_tail and op.kind not in _TAIL:
                break
            takes_only_tail = op.kind in _LAST
        prefix.append(op)
    return prefix


def cost(op: QueuedOp) -> int:
    """Count what an op takes of a budget: a pass its tokens, at least 1; anything else nothing."""
    return max(1, op.tokens) if op.kind in PASSES else 0


def part(rest: int, quantum: int) -> int:
    """Count what is next taken of a pass with so many tokens left: no part is smaller than a quantum, nor what it leaves."""
    return quantum if rest >= 2 * quantum else rest


def first_part(queue: RunQueue | None, quantum: int) -> int:
    """Count what is next taken of a run whose first op is a pass; 0 without one."""
    return part(_rest(queue.ops[0], queue.begun_tokens), quantum) if queue else 0


class Backlog:
    """One tenant's work. A run with a pass is read when its turn comes."""

    def __init__(
        self, free: Iterable[RunQueue], passes: Iterable[RunQueue], *, takes_saves: bool
    ) -> None:
        """Take what costs nothing of the runs in `free`, which do that first, and begin with the others."""
        self.works: list[_Work] = []
        """Of the runs that were read."""
        self._takes_saves = takes_saves
        self._unread = iter(passes)
        self._read: deque[_Work] = deque()
        for queue in free:
            self._wait(self._work(queue))
        self._first = self._next()

    @property
    def rest(self) -> int:
        """Count the tokens left of the next pass; 0 without one."""
        return self._first.rest if self._first else 0

    def take(self, tokens: int, *, may_stay_open: bool = False) -> None:
        """Take that much of the next pass."""
        if self._first:
            self._first.take(tokens, may_stay_open=may_stay_open)
            self._wait(self._first)
            self._first = self._next()

    def planned_parts(self) -> list[PlannedPart]:
        """Say what is taken of the passes that are divided."""
        return [part for work in self.works for part in work.planned_part()]

    def _work(self, queue: RunQueue) -> _Work:
        work = _Work(queue, runnable_prefix(queue.ops, takes_saves=self._takes_saves))
        self.works.append(work)
        return work

    def _wait(self, work: _Work) -> None:
        if work.rest:
            self._read.append(work)

    def _next(self) -> _Work | None:
        queue = next(self._unread, None)
        if queue:
            return self._work(queue)
        return self._read.popleft() if self._read else None


class _Work:
    """What one run has waiting, and what of it is taken: ops, and at last a part of a pass."""

    def __init__(self, queue: RunQueue, prefix: Iterable[QueuedOp]) -> None:
        self.queue = queue
        self.allowances: dict[RequestId, int] = {}
        self._left = deque(prefix)
        self._taken: list[QueuedOp] = []
        self._take_whole(begun_tokens=queue.begun_tokens)

    @property
    def rest(self) -> int:
        """Count the tokens left of the next pass; 0 without one."""
        return self._rest

    def take(self, tokens: int, *, may_stay_open: bool = False) -> None:
        """Take that much of the next pass; with its last token, all up to the pass after it."""
        request = self._left[0].request_id
        self._rest -= tokens
        self.allowances[request] = self.allowances.get(request, 0) + tokens
        if self._rest == 0:
            if not may_stay_open:
                del self.allowances[request]
            self._taken.append(self._left.popleft())
            self._take_whole()

    def taken(self) -> list[QueuedOp]:
        """List the ops that are taken, in part or whole."""
        return [*self._taken, self._left[0]] if self._is_divided else self._taken

    def planned_part(self) -> list[PlannedPart]:
        """Say what of the next pass is taken, where that is not all of it."""
        if not self._is_divided:
            return []
        op, queue = self._left[0], self.queue
        tokens = cost(op)
        return [PlannedPart(queue.tenant, queue.run, op.seq, tokens, tokens - self._rest)]

    @property
    def _is_divided(self) -> bool:
        return bool(self._left) and self._left[0].request_id in self.allowances

    def _take_whole(self, begun_tokens: int = 0) -> None:
        """Take what has no tokens, up to the next pass."""
        while self._left and not cost(self._left[0]):
            self._taken.append(self._left.popleft())
        is_begun = self._left and self._left[0] is self.queue.ops[0]
        self._rest = _rest(self._left[0], begun_tokens if is_begun else 0) if self._left else 0


def _rest(op: QueuedOp, begun_tokens: int) -> int:
    """Count what is left of a pass; it was not counted to the token, and still has to end."""
    return max(1, cost(op) - begun_tokens)
