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
and two quanta. A tenant with a weight of its own counts each token as 1/weight: it gets weight times the tokens
of one without, the tokens served of each over its weight differ by less than two quanta over the least weight,
and of a tenant that is `n` times as heavy as the newcomer comes at most `n` times as much before it. What has
no tokens (a create, a step, a save, a load) is always taken: it takes nothing of a cycle that could be shared,
and would hold up its run. So a run has few saves and one load in a cycle (`backlog.MOST`).

What one tenant has waiting, taken from its runs in turn: ops, and at last parts of passes. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cotrain_scheduler.fair_queue import FairQueue, PlannedPart
from cotrain_scheduler.waiting import Waiting
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, RunQueue

#: These run last in a cycle, in order…
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: … and after one of these a cycle takes nothing else of their run.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)
#: Saves and loads of one run in a cycle. They have no tokens, so that no budget bounds them: sixty loads in
#: flight would be a cycle of sixty times a whole state read, all of it in memory at once.
LIMITS = {OpKind.SAVE: 4, OpKind.LOAD: 1}


def runnable_prefix(ops: Iterable[QueuedOp], *, accepts_saves: bool = True) -> list[QueuedOp]:
    """Take the ops of one run that one cycle may hold."""
    prefix: list[QueuedOp] = []
    takes_only_tail = False
    left = {**LIMITS, OpKind.SAVE: LIMITS[OpKind.SAVE] if accepts_saves else 0}
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
    return part(_rest(queue.ops[0], queue.done_tokens), quantum) if queue else 0


class Backlog:
    """One tenant's work. A run with a pass is read when its turn comes."""

    def __init__(
        self, free: Iterable[RunQueue], passes: Iterable[RunQueue], *, accepts_saves: bool
    ) -> None:
        """Take what costs nothing of the runs in `free`, which do that first, and begin with the others."""
        self.works: list[_Work] = []
        """Of the runs that were read."""
        self._takes_saves = accepts_saves
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
        work = _Work(queue, runnable_prefix(queue.ops, accepts_saves=self._takes_saves))
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
        self._take_whole(done_tokens=queue.done_tokens)

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

    def _take_whole(self, done_tokens: int = 0) -> None:
        """Take what has no tokens, up to the next pass."""
        while self._left and not cost(self._left[0]):
            self._taken.append(self._left.popleft())
        is_begun = self._left and self._left[0] is self.queue.ops[0]
        self._rest = _rest(self._left[0], done_tokens if is_begun else 0) if self._left else 0


def _rest(op: QueuedOp, done_tokens: int) -> int:
    """Count what is left of a pass; it was not counted to the token, and still has to end."""
    return max(1, cost(op) - done_tokens)


#: Tokens a tenant is served at a time; the least part that a pass is divided into. About what a device
#: runs at once: a smaller part costs it the time of a whole one.
QUANTUM_TOKENS = 2_048
#: A cycle holds so many quanta at least, where it is short.
QUANTA_PER_CYCLE = 16
#: A cycle holds no more than this many times the tokens of the one before it, or than FIRST_TOKENS: a
#: throughput that was measured on small cycles says little of one a hundred times as large.
GROWTH = 4
FIRST_TOKENS = 8 * QUANTUM_TOKENS


@dataclass(frozen=True)
class Selection:
    """The ops of one worker's step, grouped by run and in seq order, and whose turn it is after it."""

    ops: tuple[QueuedOp, ...]
    allowances: dict[RequestId, int]
    """Of passes that may stay open: their tokens in this step, as `Step` has them."""
    tokens: int
    """Of all that the step shall run."""
    fair_queue: FairQueue


def select(
    waiting: Waiting,
    fair_queue: FairQueue,
    budget_tokens: int,
    quantum_tokens: int = QUANTUM_TOKENS,
    *,
    accepts_saves: bool = True,
    weights: Mapping[TenantId, float] = MappingProxyType({}),
) -> Selection:
    """Choose ops, and parts of passes, worth at most `budget_tokens`.

    `fair_queue` is what the last selection left; who is in `waiting.changed` is looked at again, and of all others
    nothing is read before it is their turn. Of tenants that wait, one gets tokens in proportion to its weight.

    Something is always chosen when something can run, so that nothing waits permanently. Without
    `accepts_saves` no save can, nor what its run has behind it.
    """
    free = _free(waiting, accepts_saves=accepts_saves)
    backlogs = {
        tenant: Backlog(queues, _passes(waiting, tenant), accepts_saves=accepts_saves)
        for tenant, queues in free.items()
    }
    if waiting.is_one_run(accepts_saves=accepts_saves):
        for tenant in waiting.passes:
            backlogs[tenant] = Backlog((), _passes(waiting, tenant), accepts_saves=accepts_saves)
        return _selection(
            backlogs.values(), take_single_run(backlogs.values(), budget_tokens), FairQueue()
        )
    quantum = min(quantum_tokens, max(1, budget_tokens // QUANTA_PER_CYCLE))
    fair_queue = _up_to_date(fair_queue, waiting, quantum, weights)
    for tenant, backlog in backlogs.items():
        fair_queue.wait(tenant, part(backlog.rest, quantum))
    spent = 0
    while (next_ := fair_queue.next) and spent + next_[1] <= budget_tokens:
        tenant, tokens = next_
        spent += tokens
        if tenant not in backlogs:
            backlogs[tenant] = Backlog((), _passes(waiting, tenant), accepts_saves=accepts_saves)
        backlogs[tenant].take(tokens)
        fair_queue.serve(tenant, tokens, then_waits_for=part(backlogs[tenant].rest, quantum))
    fair_queue.end_cycle(one for each in backlogs.values() for one in each.planned_parts())
    return _selection(backlogs.values(), spent, fair_queue)


def _free(waiting: Waiting, *, accepts_saves: bool) -> dict[TenantId, Iterable[RunQueue]]:
    """List, by tenant, the runs whose first op is taken in any case."""
    if not (accepts_saves and waiting.saves):
        return {tenant: runs.values() for tenant, runs in waiting.free.items()}
    tenants = waiting.free.keys() | waiting.saves.keys()
    return {
        tenant: [*waiting.free.get(tenant, {}).values(), *waiting.saves.get(tenant, {}).values()]
        for tenant in sorted(tenants)
    }


def _passes(waiting: Waiting, tenant: TenantId) -> Iterable[RunQueue]:
    return waiting.passes.get(tenant, {}).values()


def _up_to_date(
    before: FairQueue, waiting: Waiting, quantum: int, weights: Mapping[TenantId, float]
) -> FairQueue:
    """Follow what waits now, and what ran."""
    fair_queue, changed = before.copy(), waiting.changed
    fair_queue.weigh(weights)
    if quantum != fair_queue.quantum:
        fair_queue.quantum, changed = quantum, changed | waiting.passes.keys() | fair_queue.waiting
    for tenant in changed:
        fair_queue.wait(tenant, first_part(waiting.first_pass(tenant), quantum))
    fair_queue.correct({
        (queue.run, queue.ops[0].seq): queue.done_tokens
        for one in fair_queue.planned
        if (queue := waiting.passes.get(one.tenant, {}).get(one.run))
    })  # fmt: skip
    return fair_queue


def take_single_run(backlogs: Iterable[Backlog], budget_tokens: int) -> int:
    """Take what is worth a budget, and all that is left of the pass that exceeds it; return the tokens.

    It may be worth less than it seems, as long as little was measured; else the worker stops the pass
    after a clock period.
    """
    spent = 0
    for backlog in backlogs:
        while backlog.rest and spent < budget_tokens:
            spent += backlog.rest
            backlog.take(backlog.rest, may_stay_open=spent > budget_tokens)
    return spent


def _selection(backlogs: Iterable[Backlog], tokens: int, fair_queue: FairQueue) -> Selection:
    works = [work for backlog in backlogs for work in backlog.works]
    works.sort(key=lambda work: work.queue.run)
    ops = tuple(op for work in works for op in work.taken())
    allowances = {request: part for work in works for request, part in work.allowances.items()}
    return Selection(ops, allowances, tokens, fair_queue)


def budget(worker: WorkerHeartbeat, limit_s: float, last_tokens: int) -> int:
    """Count the tokens a worker does in one cycle of `limit_s`, at the throughput it measured.

    After a cycle of `last_tokens` no more than that has shown.
    """
    shown = max(FIRST_TOKENS, GROWTH * last_tokens)
    return max(1, min(shown, int(worker.tokens_per_s * limit_s)))
