"""Placement of new runs, and reassignment of the runs of lost or drained workers. Pure; times in seconds.

A new run goes to the worker that would finish it first: the one with the least load in seconds. The load is its
pending and its recent tokens, divided by its measured tokens per second. The number of its runs is no measure.
Most runs are idle, and one may send more tokens than a hundred others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import RunId, WorkerId

#: Time constant of the exponential decay of recent load.
MEMORY_S = 60.0
#: Maximum factor between a worker's throughput and the median of its kind of device.
FACTOR = 2.0
#: Recent tokens that the first run of a pool counts as. Later new runs count as an average run.
FIRST_TOKENS = 2_048.0
#: A run with fewer recent tokens is idle, and is no longer counted.
IDLE_TOKENS = 1.0


@dataclass(frozen=True)
class Candidate:
    """Worker on which a run may be placed."""

    worker: WorkerId
    tokens: float  # pending and recent tokens of the worker
    tokens_per_s: float
    fits_one_more: bool = True
    """True if one more adapter fits on its device, according to its heartbeat."""

    @property
    def seconds(self) -> float:
        """Time that the worker needs for these tokens."""
        return self.tokens / max(self.tokens_per_s, 1.0)


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


def best(candidates: Sequence[Candidate]) -> WorkerId:
    """Return the worker that would finish first. Workers with memory for one more adapter come before others.

    Raises ValueError without a candidate.
    """
    return min(candidates, key=lambda one: (not one.fits_one_more, one.seconds, one.worker)).worker


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
