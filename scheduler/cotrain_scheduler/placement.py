"""Placement of new runs, and reassignment of the runs of dead or drained workers. Pure; times in seconds.

A new run goes to the worker that would finish it first. The number of a worker's runs does not predict that:
most are idle, one may send more than a hundred others, and workers differ. So pending tokens and recent
tokens are added, and divided by the measured tokens per second of the worker.
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
#: Recent tokens of the first run; later ones count as an average run.
FIRST_TOKENS = 2_048.0
#: A run with fewer recent tokens is idle, and dropped.
AT_REST_TOKENS = 1.0


@dataclass(frozen=True)
class Candidate:
    """Worker that a run may be placed on."""

    worker: WorkerId
    tokens: float
    """Pending and recent tokens of the worker."""
    tokens_per_s: float
    fits_one_more: bool = True
    """True if one more adapter fits on its device, according to its heartbeat."""

    @property
    def seconds(self) -> float:
        """Time that the worker needs for these tokens."""
        return self.tokens / max(self.tokens_per_s, 1.0)


def rates(workers: Sequence[WorkerHeartbeat]) -> dict[WorkerId, float]:
    """Return the estimated tokens per second of each worker. Devices of one kind have similar throughput.

    A worker measured while its host was busy, above all at its start, may be wrong by a large factor. If
    it gets no runs for that reason, it is never measured again. So its rate is clamped to within FACTOR of the
    median of its kind.
    """
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for worker in workers:
        kinds[worker.device].append(worker.tokens_per_s)
    middles = {kind: median(found) for kind, found in kinds.items()}
    return {
        worker.id: min(
            max(worker.tokens_per_s, middles[worker.device] / FACTOR),
            middles[worker.device] * FACTOR,
        )
        for worker in workers
    }


def best(candidates: Sequence[Candidate]) -> WorkerId:
    """Return the worker that would finish first, preferring free memory, then the id.

    Raises ValueError without a candidate.
    """
    return min(candidates, key=lambda one: (not one.fits_one_more, one.seconds, one.worker)).worker


def fits_one_more(worker: WorkerHeartbeat) -> bool:
    """Return True if one more adapter of average size fits on a worker's device.

    Without free memory it computes as fast, but moves adapters between host and device in each cycle.
    """
    count, size = worker.adapters.get("device", 0), worker.adapter_bytes.get("device", 0)
    limit = worker.adapter_limit_bytes
    return not (limit and count) or size + size / count <= limit


class RecentTokens:
    """Recent tokens of runs, by worker, with exponential decay."""

    def __init__(self) -> None:
        self._of_run: dict[RunId, tuple[WorkerId, _Fading]] = {}
        self._of_worker: dict[WorkerId, _Fading] = {}
        self._kept = 1024
        """Number of runs above which idle ones are dropped."""

    def note(self, run: RunId, worker: WorkerId, tokens: float, now: float) -> None:
        """Add tokens of a run to a worker. Recent tokens of its previous worker move with the run."""
        home, known = self._of_run.get(run, (worker, NOTHING))
        if home != worker:
            self._of_worker[home] = self._of_worker[home].plus(-known.at(now), now)
            tokens_here = tokens + known.at(now)
        else:
            tokens_here = tokens
        self._of_worker[worker] = self._of_worker.get(worker, NOTHING).plus(tokens_here, now)
        self._of_run[run] = worker, known.plus(tokens, now)
        if len(self._of_run) > self._kept:
            self._forget_at_rest(now)

    def settle(self, run: RunId, worker: WorkerId, now: float) -> None:
        """Count a run at its new worker; a run without requests yet counts as an average one."""
        self.note(run, worker, 0.0 if run in self._of_run else self._usual(now), now)

    def of(self, worker: WorkerId, now: float) -> float:
        """Return the recent tokens of a worker."""
        return self._of_worker.get(worker, NOTHING).at(now)

    def runs_of(self, worker: WorkerId, now: float) -> dict[RunId, float]:
        """Return the recent tokens of each run of a worker."""
        return {run: each.at(now) for run, (home, each) in self._of_run.items() if home == worker}

    def _usual(self, now: float) -> float:
        if not self._of_run:
            return FIRST_TOKENS
        total = sum(fading.at(now) for fading in self._of_worker.values())
        return max(AT_REST_TOKENS, total / len(self._of_run))

    def _forget_at_rest(self, now: float) -> None:
        self._of_run = {
            run: (worker, fading)
            for run, (worker, fading) in self._of_run.items()
            if fading.at(now) >= AT_REST_TOKENS
        }
        self._kept = max(1024, 2 * len(self._of_run))


@dataclass(frozen=True)
class _Fading:
    """Decaying amount, with the time of its last update."""

    tokens: float
    noted_at: float

    def at(self, now: float) -> float:
        """Return the decayed amount. If the clock was set back, the amount does not grow."""
        return self.tokens * math.exp(-max(0.0, now - self.noted_at) / MEMORY_S)

    def plus(self, tokens: float, now: float) -> _Fading:
        """Add tokens to the decayed amount; at least 0, despite rounding."""
        return _Fading(max(0.0, self.at(now) + tokens), now)


NOTHING = _Fading(0.0, 0.0)


#: Start of each worker's time without a heartbeat, by its id and the epoch of its last process.
Absences: TypeAlias = Mapping[tuple[WorkerId, int], float]


def absences(slots: Iterable[WorkerSlot], before: Absences, now: float) -> Absences:
    """Return the start of each absence; a process that ran in between restarts it."""
    empty = [(slot.worker, slot.epoch) for slot in slots if slot.heartbeat is None]
    return {name: before.get(name, now) for name in empty}


def reassignments(
    slots: Sequence[WorkerSlot], empty_since: Absences, now: float, after_s: float
) -> list[tuple[WorkerSlot, WorkerId]]:
    """Pair each slot that was empty for `after_s` with its successor: the live worker with the fewest runs.

    Without a live worker there is no successor, and the runs of dead workers wait.
    """
    alive = [slot.heartbeat for slot in slots if slot.heartbeat is not None]
    if not alive:
        return []
    successor = min(alive, key=_runs).id
    return [
        (slot, successor)
        for slot in slots
        if now - empty_since.get((slot.worker, slot.epoch), now) >= after_s
    ]


def drained(slots: Sequence[WorkerSlot]) -> list[tuple[WorkerSlot, WorkerId]]:
    """Pair each completely drained worker with its successor, which receives its pending deletions."""
    staying = [
        slot.heartbeat for slot in slots if slot.heartbeat and slot.heartbeat.state == "serving"
    ]
    if not staying:
        return []
    successor = min(staying, key=_runs).id
    return [
        (slot, successor)
        for slot in slots
        if slot.heartbeat and slot.heartbeat.is_handing_over and slot.heartbeat.state == "drained"
    ]


def _runs(worker: WorkerHeartbeat) -> tuple[int, WorkerId]:
    return worker.runs, worker.id
