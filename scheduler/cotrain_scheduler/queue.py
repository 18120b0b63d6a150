"""Queue of one pool in memory: pending ops by worker, and the fair queue of each worker's tenants. Pure.

Each change, and each lookup of one run, costs the same however many runs wait. The selection for a cycle reads all runs
whose first op has no tokens, because it takes all of them. Of the runs with a pass it reads only those that it takes. A
fair queue is passed from cycle to cycle, so a cycle costs only its planned ops and the changes since the last one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

from cotrain_scheduler.placement import RecentTokens, best, fits_one_more, rates
from cotrain_store.messages.fleet import WEIGHT, Pauses, WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, RunQueue

#: Runs of each tenant, in round-robin order.
ByTenant: TypeAlias = "dict[TenantId, dict[RunId, RunQueue]]"


class PoolQueue:
    """Runnable runs of a pool, each at its current or assigned worker."""

    def __init__(self, window_ops: int) -> None:
        """Create a queue; the log of a run with `window_ops` ops here may contain more."""
        self._window_ops = window_ops
        self._runs: dict[RunId, RunQueue] = {}
        self._at: dict[RunId, WorkerId | None] = {}
        self._waiting: defaultdict[WorkerId | None, Waiting] = defaultdict(Waiting)
        self._tokens: Counter[WorkerId | None] = Counter()
        """Tokens waiting for each worker; for a run with a full window, only those in the window."""
        self.recent = RecentTokens()
        self._workers: list[WorkerId] = []
        self.unread: set[RunId] = set()
        """Runs whose log differs from this queue, or contains more, and must be read."""

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, run: RunId) -> RunQueue:
        return self._runs[run]

    def clear(self) -> None:
        """Remove every run."""
        for queue in list(self._runs.values()):
            self._remove(queue)
        self.unread.clear()

    def put(self, queues: Iterable[RunQueue]) -> None:
        """Update runs as they were read; a run without ops is removed. The others keep their turn."""
        for queue in queues:
            self.unread.discard(queue.run)
            known = self._runs.get(queue.run)
            if known and queue.ops and queue.worker == known.worker:
                self._runs[queue.run] = queue
                worker = self._at[queue.run]
                self._waiting[worker].replace(known, queue)
                self._tokens[worker] += tokens_of(queue) - tokens_of(known)
                continue
            if known:
                self._remove(known)
            if queue.ops:
                self._add(queue, queue.worker)

    def assign(self, workers: Sequence[WorkerHeartbeat], now: float) -> None:
        """Assign every run without a worker to the one that would finish first; again if workers change."""
        names = sorted(worker.id for worker in workers)
        if names != self._workers:
            self._workers = names
            self._move([queue for queue in self._runs.values() if queue.worker is None], None)
        unplaced = self._waiting[None]
        if workers and unplaced:
            self._assign_to_least_loaded(unplaced, workers, now)
        unplaced.changed.clear()  # no cycle is planned for these

    def _assign_to_least_loaded(self, unplaced: Waiting, workers: Sequence[WorkerHeartbeat], now: float) -> None:
        full = {worker.id for worker in workers if not fits_one_more(worker)}
        tokens_per_s = rates(workers)
        while unplaced:
            queue = next(iter(unplaced))
            seconds = {
                worker: (self._tokens[worker] + self.recent.of(worker, now)) / max(rate, 1.0)
                for worker, rate in tokens_per_s.items()
            }
            chosen = best(seconds, full)
            self.recent.settle(queue.run, chosen, now)
            self._move([queue], chosen)

    def deregister(self, worker: WorkerId) -> None:
        """Release the runs of a worker that is no longer registered."""
        lost = [queue for queue in self._runs.values() if queue.worker == worker]
        for queue in lost:
            self._remove(queue)
            self._add(replace(queue, worker=None, done_tokens=0), None)

    def reset(self, worker: WorkerId) -> None:
        """Start open passes anew: a new process of that worker id has no part of them."""
        unread = self.unread.copy()
        self.put([
            replace(queue, done_tokens=0)
            for queue in self._runs.values()
            if queue.worker == worker and queue.done_tokens
        ])  # fmt: skip
        self.unread = unread  # nothing was read here

    def waiting(self, worker: WorkerId) -> Waiting:
        """Return the runnable runs of a worker, for the planner."""
        return self._waiting[worker]

    def waiting_tokens(self, worker: WorkerId) -> int:
        """Return the number of tokens that wait for a worker."""
        return self._tokens[worker]

    def back_at(self, worker: WorkerId, runs: Iterable[RunId]) -> dict[RunId, float]:
        """Return the runs among these that wait for this worker, each with the time when its next op was accepted."""
        return {run: self._runs[run].ops[0].accepted_at for run in runs if self._at.get(run) == worker}

    def remove_planned(self, ops: Iterable[QueuedOp], worker: WorkerId, now: float) -> None:
        """Remove the ops of a worker's planned step. Its runs become the last to be served of their tenants."""
        self._waiting[worker].changed.clear()
        last: dict[RunId, int] = {}
        tokens: Counter[RunId] = Counter()
        for op in ops:  # those of one run are in order
            last[op.run] = op.seq
            tokens[op.run] += op.tokens
        for run, seq in last.items():
            queue = self._runs[run]
            left = tuple(op for op in queue.ops if op.seq > seq)
            self._remove(queue)
            if left:
                self._add(replace(queue, worker=worker, ops=left, done_tokens=0), worker)
            if len(queue.ops) >= self._window_ops:
                self.unread.add(run)
            if not queue.done_tokens:  # a pass that continues was counted when it started
                self.recent.add(run, worker, tokens[run], now)

    def _move(self, queues: Iterable[RunQueue], worker: WorkerId | None) -> None:
        for queue in queues:
            self._remove(queue)
            self._add(queue, worker)

    def _add(self, queue: RunQueue, worker: WorkerId | None) -> None:
        self._runs[queue.run] = queue
        self._at[queue.run] = worker
        self._waiting[worker].put(queue)
        self._tokens[worker] += tokens_of(queue)

    def _remove(self, queue: RunQueue) -> None:
        del self._runs[queue.run]
        worker = self._at.pop(queue.run)
        self._waiting[worker].remove(queue)
        self._tokens[worker] -= tokens_of(queue)


def tokens_of(queue: RunQueue) -> int:
    """Return the pending tokens of a run's ops in the window."""
    return sum(op.tokens for op in queue.ops) - queue.done_tokens


class Waiting:
    """Pending runs of one worker."""

    def __init__(self) -> None:
        self.passes: ByTenant = {}
        """Runs whose first op is a pass, which costs tokens."""
        self.free: ByTenant = {}
        """Runs whose first op has no tokens."""
        self.saves: ByTenant = {}
        """Runs whose first op is a save, which a worker does not always accept."""
        self.changed: set[TenantId] = set()
        """Tenants whose passes may have changed since the last cycle was planned."""

    def __bool__(self) -> bool:
        return bool(self.passes or self.free or self.saves)

    def __iter__(self) -> Iterator[RunQueue]:
        for group in (self.passes, self.free, self.saves):
            for runs in group.values():
                yield from runs.values()

    def put(self, queue: RunQueue) -> None:
        """Add a run with ops; a run already in the same group keeps its turn."""
        self._group(queue).setdefault(queue.tenant, {})[queue.run] = queue
        self.changed.add(queue.tenant)

    def remove(self, queue: RunQueue) -> None:
        """Remove a run, with the ops that it was added with."""
        group = self._group(queue)
        del group[queue.tenant][queue.run]
        if not group[queue.tenant]:
            del group[queue.tenant]
        self.changed.add(queue.tenant)

    def replace(self, known: RunQueue, queue: RunQueue) -> None:
        """Update a run."""
        if self._group(known) is not self._group(queue):
            self.remove(known)
        self.put(queue)

    def first_pass(self, tenant: TenantId) -> RunQueue | None:
        """Return the tenant's next run whose first op is a pass."""
        return next(iter(self.passes.get(tenant, {}).values()), None)

    def is_one_run(self, *, accepts_saves: bool) -> bool:
        """Return True if exactly one run can continue."""
        runs = 0
        for group in (self.passes, self.free, self.saves if accepts_saves else {}):
            for of_tenant in group.values():
                runs += len(of_tenant)
                if runs > 1:
                    return False
        return runs == 1

    def _group(self, queue: RunQueue) -> ByTenant:
        kind = queue.ops[0].kind
        if kind in PASSES:
            return self.passes
        return self.saves if kind is OpKind.SAVE else self.free


def exclude_paused(waiting: Waiting, pauses: Pauses, moving: Collection[RunId] = frozenset()) -> Waiting:
    """Return the queue without paused tenants, paused runs and moving runs. If there are none, nothing is copied."""
    if not pauses.tenants and not pauses.runs and not moving:
        return waiting
    left = Waiting()
    left.changed = waiting.changed
    left.passes, left.free, left.saves = (
        _exclude_paused(group, pauses, moving) for group in (waiting.passes, waiting.free, waiting.saves)
    )
    return left


def _exclude_paused(group: ByTenant, pauses: Pauses, moving: Collection[RunId]) -> ByTenant:
    owners = {pause.tenant for pause in pauses.runs.values()}
    left: ByTenant = {}
    for tenant, runs in group.items():
        if tenant in pauses.tenants:
            continue
        kept = runs
        if tenant in owners:
            kept = {run: queue for run, queue in runs.items() if run not in pauses.runs}
        if moving:
            kept = {run: queue for run, queue in kept.items() if run not in moving}
        if kept:
            left[tenant] = kept
    return left


class FairQueue:
    """Virtual time of each tenant (tokens served, divided by weight), and the next waiting tenant.

    The next tenant is the one whose next part would finish first. A tenant that starts to wait gets at least
    the smallest virtual time of the waiting ones. Losing this state (a scheduler restart) costs less than
    two quanta of fairness, so it is not stored.
    """

    def __init__(self, served: Mapping[TenantId, float] | None = None) -> None:
        """Start with the virtual times in `served`; other tenants start at 0."""
        self._served: dict[TenantId, float] = dict(served or {})
        self._floor = 0.0
        """Smallest virtual time of the waiting tenants; it never decreases."""
        self._parts: dict[TenantId, int] = {}
        """Tokens of the next part of each waiting tenant."""
        self._ends: list[tuple[float, TenantId]] = []
        """Virtual finish times of the next parts, sorted."""
        self._waits: list[tuple[float, TenantId]] = []
        """Virtual times of the waiting tenants, sorted."""
        self._weights: Mapping[TenantId, float] = {}
        self.quantum = 0
        """Quantum for which the parts were computed; 0 means they must be recomputed."""
        self.planned: tuple[PlannedPart, ...] = ()
        """Parts that were counted as served before they ran."""

    def copy(self, *, is_current: bool = True) -> FairQueue:
        """Return a mutable copy. If `is_current` is False, all parts must be recomputed."""
        other = copy(self)
        other._served, other._parts = dict(self._served), dict(self._parts)
        other._ends, other._waits = list(self._ends), list(self._waits)
        other.quantum = self.quantum if is_current else 0
        return other

    @property
    def next(self) -> tuple[TenantId, int] | None:
        """Return the next tenant, and the tokens of its next part."""
        return (self._ends[0][1], self._parts[self._ends[0][1]]) if self._ends else None

    @property
    def waiting(self) -> Set[TenantId]:
        """Return the waiting tenants."""
        return self._parts.keys()

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Set the weights: each token counts as 1 / weight. The default weight is WEIGHT."""
        if weights != self._weights:
            self._weights = weights
            self._ends = sorted((self._end(tenant), tenant) for tenant in self._parts)

    def wait(self, tenant: TenantId, part: int) -> None:
        """Set the next part of a tenant, in tokens; with 0 it no longer waits."""
        if tenant not in self._parts:
            if not part:
                return
            self._served[tenant] = max(self._served.get(tenant, 0), self._floor)
        elif self._parts[tenant] == part:
            return
        else:
            self._leave(tenant)
        if part:
            self._enter(tenant, part)

    def serve(self, tenant: TenantId, tokens: int, then_waits_for: int) -> None:
        """Count tokens as served, and set the next part. With 0 the tenant no longer waits."""
        if tenant in self._parts:
            self._leave(tenant)
        weight = self._weights.get(tenant, WEIGHT)
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens / weight
        if then_waits_for:
            self._enter(tenant, then_waits_for)

    def correct(self, open_passes: Mapping[tuple[RunId, int], int]) -> None:
        """Correct the planned tokens of split passes to those that ran.

        They differ because a worker runs whole slices, and stops at the end of its time. `open_passes` contains the
        tokens that ran of each pass that is still open. All other passes have ended, so all of their tokens ran.
        """
        for part in self.planned:
            ran = open_passes.get((part.run, part.seq), part.pass_tokens)
            self.serve(part.tenant, ran - part.counted_tokens, self._parts.get(part.tenant, 0))
        self.planned = ()

    def end_cycle(self, planned: Iterable[PlannedPart]) -> None:
        """Drop tenants whose virtual time is not ahead of the minimum of waiting tenants; all if none waits."""
        self.planned = tuple(planned)
        if not self._waits:
            self._served, self._floor = {}, 0.0
            return
        self._floor = max(self._floor, self._waits[0][0])
        if len(self._served) > 2 * len(self._parts):
            self._served = {
                tenant: served
                for tenant, served in self._served.items()
                if served > self._floor or tenant in self._parts
            }

    def _enter(self, tenant: TenantId, part: int) -> None:
        self._parts[tenant] = part
        insort(self._ends, (self._end(tenant), tenant))
        insort(self._waits, (self._served[tenant], tenant))

    def _leave(self, tenant: TenantId) -> None:
        del self._ends[bisect_left(self._ends, (self._end(tenant), tenant))]
        del self._waits[bisect_left(self._waits, (self._served[tenant], tenant))]
        del self._parts[tenant]

    def _end(self, tenant: TenantId) -> float:
        return self._served[tenant] + self._parts[tenant] / self._weights.get(tenant, WEIGHT)


@dataclass(frozen=True)
class PlannedPart:
    """Split pass of which a cycle contains a part."""

    tenant: TenantId
    run: RunId
    seq: int
    pass_tokens: int  # all tokens of the pass
    counted_tokens: int  # those counted as served, in this cycle and in earlier ones
