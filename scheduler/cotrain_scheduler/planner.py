"""Next cycle of one worker: its ops, its start time and its time limit. Pure: queue in, plan out. Times in seconds.

Order. The ops of a run execute in seq order. A cycle takes the longest prefix that matches

    (create | import | rewind)? (forward | forward_backward | reverse_kl)* optim_step? (save | load)*

so that a complete training step runs in one cycle, weights do not change between the forwards of a cycle, and a save
stores the weights after the step. A barrier delays only its own run.

Fairness. Tenants share the token budget of a cycle by weighted fair queueing (Demers, Keshav and Shenker, SIGCOMM
1989); runs of one tenant are served round robin. The tenant whose next part would finish first under an ideal fair
share is served next. A pass of at least two quanta is split into quanta, and the remainder continues in the next cycle.

Guarantees:

* Tokens of tenants that all have passes pending differ by less than two quanta, since they all had.
* With weights, tokens divided by weight differ by less than two quanta divided by the smallest weight. A
  tenant receives its weight times the tokens of a tenant without a weight.
* A tenant that becomes active is served before another tenant gets more than the new request's tokens
  plus two quanta. A tenant with `n` times its weight may get `n` times as much.

Ops without tokens (create, rewind, optim_step, save, load, metrics) are free and always selected, because delaying them
would block their run. The saves and loads of a run in one cycle are bounded by `LIMITS`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cotrain_scheduler.queue import FairQueue, PlannedPart, Waiting
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RequestId, RunId, TenantId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, RunQueue

#: Tokens a tenant is served at a time; the smallest part of a split pass. It is about the size that a device
#: runs at once: a smaller part takes it just as long.
QUANTUM_TOKENS = 2_048
#: Minimum number of quanta in a cycle; a short cycle has smaller quanta.
QUANTA_PER_CYCLE = 16
#: A cycle has at most this many times the tokens of the previous one, or FIRST_TOKENS if that is more. A
#: throughput measured on small cycles does not predict that of one a hundred times as large.
GROWTH = 4
FIRST_TOKENS = 8 * QUANTUM_TOKENS


@dataclass(frozen=True)
class Selection:
    """Ops of one worker's step, grouped by run and in seq order, and the fair queue after it."""

    ops: tuple[QueuedOp, ...]
    queues: dict[RunId, RunQueue]  # pending ops of each run with a selected op, as they were selected from
    allowances: dict[RequestId, int]
    """Token budget in this step for each pass that may continue in a later step. Same format as `Step`."""
    tokens: int  # total tokens planned for the step
    fair_queue: FairQueue


def select(
    waiting: Waiting,
    fair_queue: FairQueue,
    budget_tokens: int,
    quantum_tokens: int = QUANTUM_TOKENS,
    *,
    accepts_saves: bool = True,
    weights: Mapping[TenantId, float] = MappingProxyType({}),
    is_current: bool = True,
) -> Selection:
    """Select ops, and parts of passes, worth at most `budget_tokens`.

    The last selection returned `fair_queue`, which is not changed. Only tenants in `waiting.changed` are re-evaluated,
    or all if `fair_queue` is not current; other tenants are read when they are served. Waiting tenants get tokens in
    proportion to their weights.

    At least one op is selected if any can run, so that no op waits permanently. Without
    `accepts_saves`, saves and the ops after them are not selected.
    """
    if waiting.is_one_run(accepts_saves=accepts_saves):
        return _select_single_run(waiting, FairQueue(), budget_tokens, accepts_saves=accepts_saves)
    backlogs = {
        tenant: Backlog(queues, _passes(waiting, tenant), accepts_saves=accepts_saves)
        for tenant, queues in _free(waiting, accepts_saves=accepts_saves).items()
    }
    quantum = min(quantum_tokens, max(1, budget_tokens // QUANTA_PER_CYCLE))
    fair_queue = fair_queue.copy(is_current=is_current)
    _update(fair_queue, waiting, quantum, weights)
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
    works = [work for backlog in backlogs.values() for work in backlog.works]
    fair_queue.end_cycle(planned for work in works if (planned := work.planned_part()))
    return _selection(works, spent, fair_queue)


def _select_single_run(
    waiting: Waiting, fair_queue: FairQueue, budget_tokens: int, *, accepts_saves: bool
) -> Selection:
    """Select ops worth the budget, and all of the pass that exceeds it. The fair queue is new: no other tenant waits.

    The pass may take longer than expected while few measurements exist. Then the worker stops it after a clock period.
    """
    free = _free(waiting, accepts_saves=accepts_saves)
    (tenant,) = free or waiting.passes
    backlog = Backlog(free.get(tenant, ()), _passes(waiting, tenant), accepts_saves=accepts_saves)
    spent = 0
    while backlog.rest and spent < budget_tokens:
        spent += backlog.rest
        backlog.take(backlog.rest, may_stay_open=spent > budget_tokens)
    return _selection(backlog.works, spent, fair_queue)


def _free(waiting: Waiting, *, accepts_saves: bool) -> dict[TenantId, Iterable[RunQueue]]:
    """Return, by tenant, the runs whose first op is always selected."""
    if not (accepts_saves and waiting.saves):
        return {tenant: runs.values() for tenant, runs in waiting.free.items()}
    tenants = waiting.free.keys() | waiting.saves.keys()
    return {
        tenant: [*waiting.free.get(tenant, {}).values(), *waiting.saves.get(tenant, {}).values()]
        for tenant in sorted(tenants)
    }


def _passes(waiting: Waiting, tenant: TenantId) -> Iterable[RunQueue]:
    return waiting.passes.get(tenant, {}).values()


def _update(fair_queue: FairQueue, waiting: Waiting, quantum: int, weights: Mapping[TenantId, float]) -> None:
    """Update a fair queue with the pending work, and with the tokens that ran."""
    changed = waiting.changed
    fair_queue.set_weights(weights)
    if quantum != fair_queue.quantum:
        fair_queue.quantum, changed = quantum, changed | waiting.passes.keys() | fair_queue.waiting
    for tenant in changed:
        fair_queue.wait(tenant, first_part(waiting.first_pass(tenant), quantum))
    fair_queue.correct({
        (queue.run, queue.ops[0].seq): queue.done_tokens
        for one in fair_queue.planned
        if (queue := waiting.passes.get(one.tenant, {}).get(one.run))
    })  # fmt: skip


def _selection(works: Iterable[_Work], tokens: int, fair_queue: FairQueue) -> Selection:
    works = sorted((work for work in works if work.planned_ops()), key=lambda work: work.queue.run)
    return Selection(
        ops=tuple(op for work in works for op in work.planned_ops()),
        queues={work.queue.run: work.queue for work in works},
        allowances={request: tokens for work in works for request, tokens in work.allowances().items()},
        tokens=tokens,
        fair_queue=fair_queue,
    )


def budget(worker: WorkerHeartbeat, limit_s: float, last_tokens: int) -> int:
    """Return the tokens of a cycle of `limit_s`, at the worker's measured throughput.

    The limit also grows only gradually from `last_tokens`, the size of the previous cycle.
    """
    size_limit = max(FIRST_TOKENS, GROWTH * last_tokens)
    return max(1, min(size_limit, int(worker.tokens_per_s * limit_s)))


class Backlog:
    """Pending work of one tenant. A run with a pass is read when its turn comes."""

    def __init__(self, free: Iterable[RunQueue], passes: Iterable[RunQueue], *, accepts_saves: bool) -> None:
        """Plan the leading free ops of the runs in `free`; these runs come after those in `passes`."""
        self.works: list[_Work] = []
        """Runs that have been read."""
        self._takes_saves = accepts_saves
        self._unread = iter(passes)
        self._read: deque[_Work] = deque()
        for queue in free:
            self._wait(self._work(queue))
        self._first = self._next()

    @property
    def rest(self) -> int:
        """Remaining tokens of the next pass; 0 without one."""
        return self._first.rest if self._first else 0

    def take(self, tokens: int, *, may_stay_open: bool = False) -> None:
        """Plan this many tokens of the next pass."""
        if self._first:
            self._first.take(tokens, may_stay_open=may_stay_open)
            self._wait(self._first)
            self._first = self._next()

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
    """Pending ops of one run, and how many are planned."""

    def __init__(self, queue: RunQueue, prefix: Iterable[QueuedOp]) -> None:
        self.queue = queue
        self.rest = 0
        """Remaining tokens of the next pass; 0 without one."""
        self._left = deque(prefix)
        self._taken: list[QueuedOp] = []
        self._part_tokens = 0  # planned tokens of the next pass
        self._open: dict[RequestId, int] = {}  # tokens of planned passes that may continue in a later cycle
        self._take_free()

    def take(self, tokens: int, *, may_stay_open: bool = False) -> None:
        """Plan this many tokens of the next pass; with its last token, also all ops up to the next pass."""
        self.rest -= tokens
        self._part_tokens += tokens
        if self.rest:
            return
        op = self._left.popleft()
        if may_stay_open:
            self._open[op.request_id] = self._part_tokens
        self._taken.append(op)
        self._part_tokens = 0
        self._take_free()

    def planned_ops(self) -> list[QueuedOp]:
        """Return the planned ops; the last one may be planned in part."""
        return [*self._taken, self._left[0]] if self._part_tokens else self._taken

    def allowances(self) -> dict[RequestId, int]:
        """Return the planned tokens of each pass that may continue in a later cycle."""
        return {**self._open, self._left[0].request_id: self._part_tokens} if self._part_tokens else self._open

    def planned_part(self) -> PlannedPart | None:
        """Return the planned part of the next pass; None if the pass is not split."""
        if not self._part_tokens:
            return None
        op, queue = self._left[0], self.queue
        tokens = cost(op)
        return PlannedPart(queue.tenant, queue.run, op.seq, tokens, tokens - self.rest)

    def _take_free(self) -> None:
        """Plan the ops without tokens up to the next pass."""
        while self._left and not cost(self._left[0]):
            self._taken.append(self._left.popleft())
        if self._left:
            is_begun = self._left[0] is self.queue.ops[0]
            self.rest = _rest(self._left[0], self.queue.done_tokens if is_begun else 0)


#: Saves and loads of one run in a cycle. They have no tokens, so no budget limits them. Sixty loads in
#: flight would make a cycle of sixty whole states, all of them in memory at once.
LIMITS = {OpKind.SAVE: 4, OpKind.LOAD: 1}
#: These run last in a cycle, in this order.
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: After one of these, a cycle takes only saves and loads of the run.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)
#: These do not run, so they may be anywhere in a cycle.
_ANYWHERE = (OpKind.REJECTED, OpKind.METRICS)


def runnable_prefix(ops: Iterable[QueuedOp], *, accepts_saves: bool = True) -> list[QueuedOp]:
    """Return the ops of one run that one cycle may contain."""
    prefix: list[QueuedOp] = []
    takes_only_tail = False
    left = {**LIMITS, OpKind.SAVE: LIMITS[OpKind.SAVE] if accepts_saves else 0}
    for op in ops:
        if op.kind in left:
            if not left[op.kind]:
                break
            left[op.kind] -= 1
        if op.kind is OpKind.REWIND and prefix:  # its worker rewinds the run before the cycle
            break
        if op.kind not in _ANYWHERE:
            if takes_only_tail and op.kind not in _TAIL:
                break
            takes_only_tail = op.kind in _LAST
        prefix.append(op)
    return prefix


def cost(op: QueuedOp) -> int:
    """Return the budget cost of an op: the tokens of a pass, at least 1; otherwise 0."""
    return max(1, op.tokens) if op.kind in PASSES else 0


def part(rest: int, quantum: int) -> int:
    """Return the tokens of the next part of a pass; no part or remainder is smaller than a quantum."""
    return quantum if rest >= 2 * quantum else rest


def first_part(queue: RunQueue | None, quantum: int) -> int:
    """Return the tokens of the next part of a run whose first op is a pass; 0 without one."""
    return part(_rest(queue.ops[0], queue.done_tokens), quantum) if queue else 0


def _rest(op: QueuedOp, done_tokens: int) -> int:
    """Return the remaining tokens of a pass, at least 1: counts are approximate, and the pass still has to end."""
    return max(1, cost(op) - done_tokens)


#: Minimum time that an eager cycle waits for the runs of the last one.
GATHER_S = 0.005
#: Maximum wait for the other runs of the last cycle, as a share of its duration.
GATHER_SHARE = 0.1
#: Wait at most this multiple of the recent return time.
PATIENCE = 3.0
#: Decay factor of the return time per cycle without a return.
FADES = 0.5
#: Share of the clock period that an eager cycle may take. A request that arrives when a cycle has just started waits for
#: the rest of it, for the gather window and for all of the next: 2.1 cycles. The rest of the period is a reserve for
#: unknowns: a micro-batch that runs past the limit, and a wrong throughput estimate.
EAGER_SHARE = 0.4


@dataclass(frozen=True)
class LastCycle:
    """Runs, duration and end of a worker's previous cycle."""

    runs: frozenset[RunId] = frozenset()
    duration_s: float = 0.0
    ended_at: float = 0.0


def return_time_s(latest_s: float, delays_s: Iterable[float], limit_s: float) -> float:
    """Return the longest recent time between a response and the next request of its run, from its previous value.

    `delays_s` are the times of the runs that came back since the last cycle. A time longer than the gather window of a
    cycle of `limit_s`, the longest possible cycle, is ignored. Loops with two steps in flight return at once. Loops that
    have ended, or are sampling, do not return: waiting a tenth of each cycle for them would cost all other runs that tenth.
    """
    in_time = [delay_s for delay_s in delays_s if delay_s <= GATHER_SHARE * limit_s]
    return max([FADES * latest_s, *in_time])


def eager_start(last: LastCycle, now: float, gather_s: float, return_s: float, *, are_back: bool) -> float:
    """Return the start time of an eager cycle; `are_back` means that all runs of the last cycle wait again.

    Then it starts at once, so a single run never waits. Otherwise, the runs just answered get at least a few
    milliseconds to send their next request. That time grows with the recent `return_time_s`, up to a tenth of
    the last cycle. A cycle without them would make them wait for a whole one.
    """
    if are_back:
        return now
    window_s = min(GATHER_SHARE * last.duration_s, PATIENCE * return_s)
    return max(now, last.ended_at + max(gather_s, window_s))


def cycle_limit_s(period_s: float, *, begins_at_once: bool) -> float:
    """Return the time limit of a cycle, so that a request waiting for an eager cycle is answered within a period.

    Cycles of the metronome start one period apart, whatever they contain, and may fill it.
    """
    return EAGER_SHARE * period_s if begins_at_once else period_s


def period_number(now: float, period_s: float) -> int:
    """Return the number of the metronome's period; a cycle starts only at a multiple of the period."""
    return math.floor(now / period_s)
