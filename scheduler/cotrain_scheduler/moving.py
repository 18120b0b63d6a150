"""Decide which runs go to another worker, so that none computes all the time while another rests. Pure; times in s.

A run stays where it is as long as that is good enough: moving one costs a copy, and a wait of its requests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from cotrain_scheduler.placement import MEMORY_S
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.monitoring.backlog import computed

#: Of work, by which one worker has to have more than another: two clock periods, of some six that MEMORY_S has.
DIFFERENCE_S = 20.0
#: For how long.
LASTS_S = 20.0
#: After moves the loads of the workers follow; nothing more is moved until then.
REST_S = MEMORY_S
#: A move that takes longer does not come about: its run goes on where it is.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Load:
    """One worker's work, in seconds of it."""

    worker: WorkerId
    seconds: float
    """All of it."""
    training_s: float
    """Of these, what is its runs': sampling stays where it is when they go."""
    tokens_of: Mapping[RunId, float]
    """What its runs asked for lately."""


def load_of(
    worker: WorkerHeartbeat, queued_tokens: float, tokens_of: Mapping[RunId, float]
) -> Load:
    """Sum up what a worker did in the last minute, and what waits there."""
    busy_s = MEMORY_S * min(computed(worker.duty), 1.0)
    sampling_s = MEMORY_S * worker.duty.get("sample", 0.0)
    waiting_s = queued_tokens / max(worker.tokens_per_s, 1.0)
    return Load(worker.id, busy_s + waiting_s, max(0.0, busy_s - sampling_s) + waiting_s, tokens_of)


@dataclass
class Balance:
    """Since when the workers of a pool differ, and when runs were moved last."""

    _differ_since: float | None = None
    _moved_at: float | None = None

    def moves(
        self, loads: Sequence[Load], now: float, resting: Container[RunId] = frozenset()
    ) -> list[tuple[RunId, WorkerId]]:
        """Say which runs go where, now; `resting` are not moved: they were within the last ten minutes."""
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
    """Move runs, the largest that fits first, from who has most to who has least, while that evens them out."""
    seconds = {load.worker: load.seconds for load in loads}
    parts = {load.worker: _parts(load, resting) for load in loads}
    found: list[tuple[RunId, WorkerId]] = []
    while True:
        hot = max(seconds, key=lambda name: (seconds[name], name))
        cold = min(seconds, key=lambda name: (seconds[name], name))
        gap = seconds[hot] - seconds[cold]
        # Half the gap evens both out. The larger part has to shrink by more than a run's share is off.
        fitting = [(part, run) for run, part in parts[hot].items() if 0 < part <= gap / 2]
        if gap < DIFFERENCE_S or not fitting:
            return found
        part, run = max(fitting)
        del parts[hot][run]  # each at most once
        seconds[hot] -= part
        seconds[cold] += part
        found.append((run, cold))


def _parts(load: Load, resting: Container[RunId]) -> dict[RunId, float]:
    """Say how much of a worker's training each of its runs is, in s; those aside that stay."""
    total = sum(load.tokens_of.values())
    return {
        run: load.training_s * tokens / total
        for run, tokens in load.tokens_of.items()
        if total and run not in resting
    }
