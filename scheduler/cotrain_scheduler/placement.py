"""Placement of runs on the workers of a pool: new runs, runs of lost or drained workers, and moves. Times in seconds.

A new run goes to the worker with the least load: its pending and recent tokens, divided by its measured tokens per
second. The number of its runs is no measure: most runs are idle, and one may send more tokens than a hundred others.
A run stays on its worker while the balance is good enough, because a move costs a copy and delays its requests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import structlog

from cotrain_store.messages.fleet import Move, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.moves import QUIET_S

log = structlog.get_logger()

#: Time constant of the exponential decay of recent load.
MEMORY_S = 60.0
#: Maximum factor between a worker's throughput and the median of its kind of device.
FACTOR = 2.0
#: Recent tokens that the first run of a pool counts as. Later new runs count as an average run.
FIRST_TOKENS = 2_048.0
#: A run with fewer recent tokens is idle, and is no longer counted.
IDLE_TOKENS = 1.0


def rates(workers: Sequence[WorkerHeartbeat]) -> dict[WorkerId, float]:
    """Return the estimated tokens per second of each worker. Devices of one kind have similar throughput.

    The measurement of a worker on a busy host may be wrong by a large factor, above all at its start. A worker
    that gets no runs for that reason is never measured again. So its rate is clamped to within FACTOR of the
    median of its kind.
    """
    rates_by_device: defaultdict[str, list[float]] = defaultdict(list)
    for worker in workers:
        rates_by_device[worker.device].append(worker.tokens_per_s)
    medians = {device: median(rates) for device, rates in rates_by_device.items()}
    return {
        worker.id: min(max(worker.tokens_per_s, medians[worker.device] / FACTOR), medians[worker.device] * FACTOR)
        for worker in workers
    }


def best(seconds: Mapping[WorkerId, float], full: Collection[WorkerId] = ()) -> WorkerId:
    """Return the worker with the least work in seconds. Workers in `full`, without memory for one more adapter, come last.

    Raises ValueError without a worker.
    """
    return min(seconds, key=lambda worker: (worker in full, seconds[worker], worker))


def fits_one_more(worker: WorkerHeartbeat) -> bool:
    """Return True if one more adapter of average size fits on a worker's device.

    Without free memory it computes as fast, but moves adapters between host and device in each cycle.
    """
    count, size = worker.adapters.get("device", 0), worker.adapter_bytes.get("device", 0)
    limit = worker.adapter_limit_bytes
    if not limit or not count:
        return True
    return size + size / count <= limit


@dataclass(frozen=True)
class _Fading:
    """Decaying amount, with the time of its last update."""

    tokens: float
    updated_at: float

    def at(self, now: float) -> float:
        """Return the decayed amount. If the clock was set back, the amount does not grow."""
        return self.tokens * math.exp(-max(0.0, now - self.updated_at) / MEMORY_S)

    def plus(self, tokens: float, now: float) -> _Fading:
        """Add tokens to the decayed amount; at least 0, despite rounding."""
        return _Fading(max(0.0, self.at(now) + tokens), now)


NOTHING = _Fading(0.0, 0.0)


class RecentTokens:
    """Recent tokens of runs, by worker, with exponential decay."""

    def __init__(self) -> None:
        self._of_run: dict[RunId, tuple[WorkerId, _Fading]] = {}
        self._of_worker: dict[WorkerId, _Fading] = {}
        self._kept = 1024
        """Number of runs above which idle ones are removed from the count."""

    def add(self, run: RunId, worker: WorkerId, tokens: float, now: float) -> None:
        """Add tokens of a run to a worker. Recent tokens of its previous worker move with the run."""
        previous, earlier = self._of_run.get(run, (worker, NOTHING))
        moved = 0.0
        if previous != worker:
            moved = earlier.at(now)
            self._of_worker[previous] = self._of_worker[previous].plus(-moved, now)
        self._of_worker[worker] = self._of_worker.get(worker, NOTHING).plus(tokens + moved, now)
        self._of_run[run] = worker, earlier.plus(tokens, now)
        if len(self._of_run) > self._kept:
            self._forget_idle(now)

    def settle(self, run: RunId, worker: WorkerId, now: float) -> None:
        """Count a run at its new worker. A run without requests so far counts as an average one."""
        self.add(run, worker, 0.0 if run in self._of_run else self._average(now), now)

    def of(self, worker: WorkerId, now: float) -> float:
        """Return the recent tokens of a worker."""
        return self._of_worker.get(worker, NOTHING).at(now)

    def runs_of(self, worker: WorkerId, now: float) -> dict[RunId, float]:
        """Return the recent tokens of each run of a worker."""
        return {run: each.at(now) for run, (at, each) in self._of_run.items() if at == worker}

    def _average(self, now: float) -> float:
        if not self._of_run:
            return FIRST_TOKENS
        total = sum(fading.at(now) for fading in self._of_worker.values())
        return max(IDLE_TOKENS, total / len(self._of_run))

    def _forget_idle(self, now: float) -> None:
        self._of_run = {
            run: (worker, fading) for run, (worker, fading) in self._of_run.items() if fading.at(now) >= IDLE_TOKENS
        }
        self._kept = max(1024, 2 * len(self._of_run))


#: Time since which each worker slot has no heartbeat, by worker id and the epoch of its last process.
Absences: TypeAlias = Mapping[tuple[WorkerId, int], float]


def absences(slots: Iterable[WorkerSlot], before: Absences, now: float) -> Absences:
    """Return the absences as of `now`, given those of the last call.

    A process that held the slot in between had another epoch, so a new absence begins after it.
    """
    empty = [(slot.worker, slot.epoch) for slot in slots if slot.heartbeat is None]
    return {name: before.get(name, now) for name in empty}


def reassignments(
    slots: Sequence[WorkerSlot], empty_since: Absences, now: float, after_s: float
) -> list[tuple[WorkerSlot, WorkerId]]:
    """Pair each slot that was empty for `after_s` with its successor: the running worker with the fewest runs.

    Without a running worker there is no successor, and the runs of lost workers wait.
    """
    running = [slot.heartbeat for slot in slots if slot.heartbeat is not None]
    if not running:
        return []
    successor = min(running, key=_runs).id
    return [(slot, successor) for slot in slots if now - empty_since.get((slot.worker, slot.epoch), now) >= after_s]


def drained(slots: Sequence[WorkerSlot]) -> list[tuple[WorkerSlot, WorkerId]]:
    """Pair each completely drained worker with its successor, which receives its pending deletions."""
    serving = [slot.heartbeat for slot in slots if slot.heartbeat and slot.heartbeat.state == "serving"]
    if not serving:
        return []
    successor = min(serving, key=_runs).id
    return [
        (slot, successor)
        for slot in slots
        if slot.heartbeat and slot.heartbeat.is_handing_over and slot.heartbeat.state == "drained"
    ]


def _runs(worker: WorkerHeartbeat) -> tuple[int, WorkerId]:
    return worker.runs, worker.id


#: Interval between comparisons of the loads.
COMPARE_EVERY_S = 1.0
#: Minimum difference of work between two workers: two clock periods; MEMORY_S has about six.
DIFFERENCE_S = 20.0
#: Minimum duration of that difference.
LASTS_S = 20.0
#: Pause after moves, until the measured loads reflect them.
REST_S = MEMORY_S
#: A move that takes longer is cancelled, and its run stays on its worker.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Load:
    """Work of one worker, in seconds."""

    worker: WorkerId
    seconds: float  # total work
    training_s: float  # training part of it; sampling stays on the worker when runs move
    tokens_of: Mapping[RunId, float]  # recent tokens of its runs


def load_of(worker: WorkerHeartbeat, queued_tokens: float, tokens_of: Mapping[RunId, float]) -> Load:
    """Return the load of a worker: its work of the last minute, and its pending work."""
    busy_s = MEMORY_S * min(worker.busy, 1.0)
    sampling_s = MEMORY_S * worker.duty.get("sample", 0.0)
    waiting_s = queued_tokens / max(worker.tokens_per_s, 1.0)
    return Load(worker.id, busy_s + waiting_s, max(0.0, busy_s - sampling_s) + waiting_s, tokens_of)


@dataclass
class Balance:
    """Imbalance of the workers of a pool: its start, and the time of the last moves."""

    _differ_since: float | None = None
    _moved_at: float | None = None

    def moves(
        self, loads: Sequence[Load], now: float, resting: Container[RunId] = frozenset()
    ) -> list[tuple[RunId, WorkerId]]:
        """Return the moves to start now; `resting` runs moved within the last ten minutes and stay."""
        if self._moved_at is not None and 0 <= now - self._moved_at < REST_S:
            return []
        seconds = [load.seconds for load in loads]
        if len(loads) < 2 or max(seconds) - min(seconds) < DIFFERENCE_S:
            self._differ_since = None
            return []
        if self._differ_since is None or now < self._differ_since:
            self._differ_since = now
        if now - self._differ_since < LASTS_S:
            return []
        found = levelled(loads, resting)
        if found:
            self._differ_since, self._moved_at = None, now
        return found


def levelled(loads: Sequence[Load], resting: Container[RunId]) -> list[tuple[RunId, WorkerId]]:
    """Return moves from the most to the least loaded worker, largest fitting run first, until balanced."""
    seconds = {load.worker: load.seconds for load in loads}
    parts = {load.worker: _parts(load, resting) for load in loads}
    found: list[tuple[RunId, WorkerId]] = []
    while True:
        hot = max(seconds, key=lambda name: (seconds[name], name))
        cold = min(seconds, key=lambda name: (seconds[name], name))
        gap = seconds[hot] - seconds[cold]
        # Half the gap balances both. The larger load must shrink by more than the error of a run's share.
        fitting = [(part, run) for run, part in parts[hot].items() if 0 < part <= gap / 2]
        if gap < DIFFERENCE_S or not fitting:
            return found
        part, run = max(fitting)
        del parts[hot][run]  # each run moves at most once
        seconds[hot] -= part
        seconds[cold] += part
        found.append((run, cold))


def _parts(load: Load, resting: Container[RunId]) -> dict[RunId, float]:
    """Return the training seconds of each run of a worker, without the resting ones."""
    total = sum(load.tokens_of.values())
    return {
        run: load.training_s * tokens / total for run, tokens in load.tokens_of.items() if total and run not in resting
    }


class Rebalancing:
    """Moves of one pool, by the operator and by the scheduler. Requests them, and cancels those that fail."""

    def __init__(self, dispatch: Dispatch, pool: PoolId) -> None:
        self._dispatch = dispatch
        self._pool = pool
        self._balance = Balance()
        self._since: dict[RunId, float] = {}
        self._moved: dict[RunId, float] = {}
        self._compared_at = 0.0

    async def moving_runs(
        self,
        wanted: Sequence[Move],
        workers: Sequence[WorkerHeartbeat],
        waiting_tokens: Callable[[WorkerId], int],
        recent: RecentTokens,
        now: float,
    ) -> frozenset[RunId]:
        """Return the runs that are being moved, including new moves; nothing is planned for them.

        `waiting_tokens` returns the tokens that wait for a worker. Raises Fenced: a newer scheduler leads.
        """
        if len(workers) < 2:  # no move is possible
            self._since.clear()
            return frozenset()
        self._since = {move.run: self._since.get(move.run, now) for move in wanted}
        moving = {move.run for move in wanted if await self._is_under_way(move, workers, now)}
        if not wanted and not 0 <= now - self._compared_at < COMPARE_EVERY_S:
            self._compared_at = now
            moving |= await self._even_out(workers, waiting_tokens, recent, now)
        return frozenset(moving)

    async def _is_under_way(self, move: Move, workers: Sequence[WorkerHeartbeat], now: float) -> bool:
        serving = {worker.id for worker in workers}
        if {move.owner, move.to} <= serving and now - self._since[move.run] < PATIENCE_S:
            return True
        await self._dispatch.moves.cancel(self._pool, move.run)
        log.warning("move_given_up", pool=self._pool, run=move.run, to=move.to)
        return False

    async def _even_out(
        self,
        workers: Sequence[WorkerHeartbeat],
        waiting_tokens: Callable[[WorkerId], int],
        recent: RecentTokens,
        now: float,
    ) -> set[RunId]:
        self._moved = {run: at for run, at in self._moved.items() if 0 <= now - at < QUIET_S}
        loads = [
            load_of(worker, waiting_tokens(worker.id), recent.runs_of(worker.id, now))
            for worker in workers
            if worker.state == "serving"
        ]
        moving = set()
        for run, to in self._balance.moves(loads, now, self._moved):
            self._moved[run] = now
            if await self._dispatch.request_move(self._pool, run, to):
                moving.add(run)
                recent.settle(run, to, now)
                log.info("move_asked", pool=self._pool, run=run, to=to)
        return moving
