"""Selection of runs that move to another worker, to balance the load. Pure; times in seconds.

A run stays on its worker while the balance is good enough: a move costs a copy, and delays its requests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from cotrain_scheduler.placement import MEMORY_S
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId

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
    seconds: float
    """Total work."""
    training_s: float
    """Training part of it; sampling stays on the worker when runs move."""
    tokens_of: Mapping[RunId, float]
    """Recent tokens of its runs."""


def load_of(
    worker: WorkerHeartbeat, queued_tokens: float, tokens_of: Mapping[RunId, float]
) -> Load:
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
        run: load.training_s * tokens / total
        for run, tokens in load.tokens_of.items()
        if total and run not in resting
    }
