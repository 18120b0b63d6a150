"""Decide what the next cycle of one worker holds. Pure: the queue in, a plan out.

Order: a run's ops are taken in seq order, as the longest prefix of the form
`(create | import)? (forward | forward_backward | reverse_kl)* optim_step? (save | load)*`, so that a
step submitted whole trains in one cycle, weights never change under a forward, and what is saved is
what the step left. A barrier holds back its own run only.

Fairness: fair queueing by tokens between tenants; the runs of one take turns. Next is the tenant whose next
part would end first, had all who wait been served alike (Demers, Keshav and Shenker, SIGCOMM 1989). A pass
of two quanta or more is taken by the quantum; what of it a cycle does not hold goes on in the next one.
Among tenants that always have passes waiting, the tokens served since they all had differ by less than two
quanta; and a tenant that had nothing waiting is served before another gets more than that request's tokens
and two quanta. What has no tokens (a create, a step, a save, a load) is always taken: it takes nothing of a
cycle that could be shared, and would hold up its run.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cotrain_store.messages.ops import PASSES, OpKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.messages.ids import RequestId, RunId, TenantId
    from cotrain_store.messages.ops import QueuedOp, RunQueue

#: Tokens a tenant is served at a time; the least part that a pass is divided into. About what a device
#: runs at once: a smaller part costs it the time of a whole one.
QUANTUM_TOKENS = 2_048
#: A cycle holds so many quanta at least, where it is short.
QUANTA_PER_CYCLE = 16
#: A cycle holds no more than this many times the tokens of the one before it, or than FIRST_TOKENS: a
#: throughput that was measured on small cycles says little of one a hundred times as large.
GROWTH = 4
FIRST_TOKENS = 8 * QUANTUM_TOKENS
#: These run last in a cycle, in order…
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: … and after one of these a cycle takes nothing else of their run.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)


@dataclass(frozen=True)
class Fairness:
    """What one cycle hands to the next: who was served more than the least served of those who wait.

    In tokens; 0 for all others. Losing it (a scheduler restart) costs less than two quanta of
    fairness, so it is not stored.
    """

    tenants: Mapping[TenantId, int] = field(default_factory=dict)
    parts: tuple[PlannedPart, ...] = ()
    """What was counted as served before it ran."""

    def corrected(self, waiting: Mapping[TenantId, Iterable[RunQueue]]) -> dict[TenantId, int]:
        """Count what ran instead of what was planned: a worker runs whole slices, and stops in time."""
        runs = {part.run for part in self.parts}
        begun = {
            (queue.run, queue.ops[0].seq): queue.begun_tokens
            for part in self.parts
            for queue in waiting.get(part.tenant, ())
            if queue.run in runs
        }
        tenants = dict(self.tenants)
        for part in self.parts:
            ran = begun.get((part.run, part.seq), part.tokens)  # what is not there has ended
            tenants[part.tenant] = tenants.get(part.tenant, 0) + ran - part.begun_by_then
        return tenants


@dataclass(frozen=True)
class PlannedPart:
    """A pass that was divided: how many of its tokens were planned up to now."""

    tenant: TenantId
    run: RunId
    seq: int
    tokens: int
    begun_by_then: int


@dataclass(frozen=True)
class Selection:
    """The ops of one worker's step, grouped by run and in seq order, and the fairness after it."""

    ops: tuple[QueuedOp, ...]
    allowances: dict[RequestId, int]
    """Of passes that may stay open: their tokens in this step, as `Step` has them."""
    tokens: int
    """Of all that the step shall run."""
    fairness: Fairness


def select(
    waiting: Mapping[TenantId, Iterable[RunQueue]],
    fairness: Fairness,
    budget_tokens: int,
    quantum_tokens: int = QUANTUM_TOKENS,
    *,
    takes_saves: bool = True,
) -> Selection:
    """Choose ops, and parts of passes, worth at most `budget_tokens`.

    `waiting` has the runs of each tenant, in the order in which they get their turns. Of all of them the first
    op is looked at; the others only where they may be taken.

    Something is always chosen when something can run, so that nothing waits permanently. Without
    `takes_saves` no save can, nor what its run has behind it.
    """
    backlogs = {
        tenant: _Backlog(queues, takes_saves=takes_saves) for tenant, queues in waiting.items()
    }
    if sum(backlog.runs for backlog in backlogs.values()) == 1:
        return _selection(backlogs, _all_alone(backlogs, budget_tokens), Fairness())
    quantum = min(quantum_tokens, max(1, budget_tokens // QUANTA_PER_CYCLE))
    tenants = _FairQueue(fairness.corrected(waiting))
    for tenant, backlog in backlogs.items():
        tenants.wait(tenant, backlog.part(quantum))
    spent = 0
    while (part := tenants.part) and spent + part <= budget_tokens:
        spent += part
        backlog = backlogs[tenants.next]
        backlog.take(part)
        tenants.serve(backlog.part(quantum))
    parts = tuple(part for each in backlogs.values() for part in each.planned_parts())
    return _selection(backlogs, spent, Fairness(tenants.leads(), parts))


def _all_alone(backlogs: Mapping[TenantId, _Backlog], budget_tokens: int) -> int:
    """Take what is worth a budget, and all that is left of the pass that exceeds it; return the tokens.

    It may be worth less than it seems, as long as little was measured; else the worker stops the pass
    after a clock period.
    """
    spent = 0
    for backlog in backlogs.values():
        while backlog.rest and spent < budget_tokens:
            spent += backlog.rest
            backlog.take(backlog.rest, may_stay_open=spent > budget_tokens)
    return spent


def _selection(backlogs: Mapping[TenantId, _Backlog], tokens: int, fairness: Fairness) -> Selection:
    works = [work for backlog in backlogs.values() for work in backlog.works]
    works.sort(key=lambda work: work.queue.run)
    ops = tuple(op for work in works for op in work.taken())
    allowances = {request: part for work in works for request, part in work.allowances.items()}
    return Selection(ops, allowances, tokens, fairness)


def runnable_prefix(ops: Iterable[QueuedOp], *, takes_saves: bool = True) -> list[QueuedOp]:
    """Take the ops of one run that one cycle may hold."""
    prefix: list[QueuedOp] = []
    takes_only_tail = False
    for op in ops:
        if op.kind is OpKind.SAVE and not takes_saves:
            break
        if op.kind is not OpKind.REJECTED:
            if takes_only_tail and op.kind not in _TAIL:
                break
            takes_only_tail = op.kind in _LAST
        prefix.append(op)
    return prefix


def cost(op: QueuedOp) -> int:
    """Count what an op takes of a budget: a pass its tokens, at least 1; anything else nothing."""
    return max(1, op.tokens) if op.kind in PASSES else 0


def budget(worker: WorkerHeartbeat, period_s: float, last_tokens: int) -> int:
    """Count the tokens a worker does in one clock period, at the throughput it measured.

    After a cycle of `last_tokens` no more than that has shown.
    """
    shown = max(FIRST_TOKENS, GROWTH * last_tokens)
    return max(1, min(shown, int(worker.tokens_per_s * period_s)))


class _Backlog:
    """One tenant's work, taken from its runs in turn. A run is read when its turn comes."""

    def __init__(self, queues: Iterable[RunQueue], *, takes_saves: bool) -> None:
        self.works: list[_Work] = []
        """Of the runs that were read."""
        self._takes_saves = takes_saves
        self._unread: deque[RunQueue] = deque()
        self._read: deque[_Work] = deque()
        for queue in queues:
            if queue.ops[0].kind in PASSES:
                self._unread.append(queue)
            elif takes_saves or queue.ops[0].kind is not OpKind.SAVE:
                self._wait(self._work(queue))
        self.runs = len(self._unread) + len(self.works)
        self._first = self._next()

    @property
    def rest(self) -> int:
        """Count the tokens left of the next pass; 0 without one."""
        return self._first.rest if self._first else 0

    def part(self, quantum: int) -> int:
        """Count what is next taken of that: no part is smaller than a quantum, nor what it leaves."""
        return quantum if self.rest >= 2 * quantum else self.rest

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
        if self._unread:
            return self._work(self._unread.popleft())
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
        tokens = cost(self._left[0]) if self._left else 0
        self._rest = max(1, tokens - begun_tokens) if is_begun else tokens


class _FairQueue:
    """Whose turn it is among those who wait: of the tenant whose next part would end first."""

    def __init__(self, served: Mapping[TenantId, int]) -> None:
        self._served = dict(served)
        self._waiting: list[tuple[int, int, TenantId, int]] = []
        self._came = 0

    @property
    def part(self) -> int:
        """Count the tokens of the next part; 0 when none waits."""
        return self._waiting[0][3] if self._waiting else 0

    @property
    def next(self) -> TenantId:
        """Name whose part that is."""
        return self._waiting[0][2]

    def wait(self, name: TenantId, part: int) -> None:
        """Let one wait for a part, if there is one; of those that would end together, the first is next."""
        if part:
            self._came += 1
            ends = self._served.setdefault(name, 0) + part
            heapq.heappush(self._waiting, (ends, self._came, name, part))

    def serve(self, then_waits_for: int) -> None:
        """Count the next part as served."""
        ends, _, name, _ = heapq.heappop(self._waiting)
        self._served[name] = ends
        self.wait(name, then_waits_for)

    def leads(self) -> dict[TenantId, int]:
        """Say by how much each was served more than the least served who waits; nothing, when none waits."""
        if not self._waiting:
            return {}
        least = min(self._served[name] for _, _, name, _ in self._waiting)
        return {name: served - least for name, served in self._served.items() if served > least}
