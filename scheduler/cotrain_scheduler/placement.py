"""Decide which worker a new run trains on: where what is asked for would be done first. Pure; times in seconds.

How many runs a worker has says little of that: most are at rest, one may send more than a hundred others, and
workers differ. So what waits there and what was asked for lately are counted in tokens, over the tokens per
second that the worker measures.

Decide which dead or drained worker's work goes to whom. Pure; times in seconds, `now` comes in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from cotrain_scheduler.planner import QUANTUM_TOKENS
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import RunId, WorkerId

#: What was asked for so long ago counts 1/e of what is asked for now.
MEMORY_S = 60.0
#: Workers with devices of one kind differ by no more than this from the middle of them.
FACTOR = 2.0
#: Below this many tokens a run is at rest, and forgotten.
AT_REST_TOKENS = 1.0


@dataclass(frozen=True)
class Candidate:
    """A worker that a run may go to."""

    worker: WorkerId
    tokens: float
    """That wait there, or were asked for lately."""
    tokens_per_s: float
    fits_one_more: bool = True
    """Whether one more adapter fits on its device, as far as its heartbeat tells."""

    @property
    def seconds(self) -> float:
        """How long that would take it."""
        return self.tokens / max(self.tokens_per_s, 1.0)


def rates(workers: Sequence[WorkerHeartbeat]) -> dict[WorkerId, float]:
    """Say how many tokens per second each worker is taken to do. Devices of one kind do about as much.

    One that was measured while its host was busy, at its start above all, may be many times off; and a worker that
    gets no runs for it is never measured again. So it is believed as far as FACTOR from the middle of its kind.
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
    """Choose the worker with room that would be done first; of several, the first by name. Raises ValueError without one."""
    return min(candidates, key=lambda one: (not one.fits_one_more, one.seconds, one.worker)).worker


def fits_one_more(worker: WorkerHeartbeat) -> bool:
    """Tell whether one more adapter, like those that a worker has, fits on its device.

    Without room it computes as well, and moves adapters between host and device in each cycle.
    """
    count, size = worker.adapters.get("device", 0), worker.adapter_bytes.get("device", 0)
    limit = worker.adapter_limit_bytes
    return not (limit and count) or size + size / count <= limit


class RecentTokens:
    """What runs asked of their workers lately, in tokens: the older, the less it counts."""

    def __init__(self) -> None:
        self._of_run: dict[RunId, tuple[WorkerId, _Fading]] = {}
        self._of_worker: dict[WorkerId, _Fading] = {}
        self._kept = 1024
        """Runs at rest are looked for where there are more than these."""

    def note(self, run: RunId, worker: WorkerId, tokens: float, now: float) -> None:
        """Count what a run asks of a worker; what it asked of another one before counts here from now on."""
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
        """Count a run that a worker is to have; one that asked for nothing yet as if it were like the others."""
        self.note(run, worker, 0.0 if run in self._of_run else self._usual(now), now)

    def of(self, worker: WorkerId, now: float) -> float:
        """Return the tokens that were asked of a worker lately."""
        return self._of_worker.get(worker, NOTHING).at(now)

    def runs_of(self, worker: WorkerId, now: float) -> dict[RunId, float]:
        """Return the runs that asked a worker for something lately, with what is left of that."""
        return {run: each.at(now) for run, (home, each) in self._of_run.items() if home == worker}

    def _usual(self, now: float) -> float:
        if not self._of_run:
            return float(QUANTUM_TOKENS)
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
    """An amount, as it was at a time."""

    tokens: float
    noted_at: float

    def at(self, now: float) -> float:
        """Return what is left of it; a clock that was set back lets nothing grow."""
        return self.tokens * math.exp(-max(0.0, now - self.noted_at) / MEMORY_S)

    def plus(self, tokens: float, now: float) -> _Fading:
        """Add to what is left; never below nothing, which is where roundings would lead."""
        return _Fading(max(0.0, self.at(now) + tokens), now)


NOTHING = _Fading(0.0, 0.0)


#: Since when a worker gave no heartbeat, by its id and the epoch of the last process that had it.
Absences: TypeAlias = Mapping[tuple[WorkerId, int], float]


def absences(slots: Iterable[WorkerSlot], before: Absences, now: float) -> Absences:
    """Note since when slots are empty; a process that came and went in between starts it anew."""
    empty = [(slot.worker, slot.epoch) for slot in slots if slot.heartbeat is None]
    return {name: before.get(name, now) for name in empty}


def reassignments(
    slots: Sequence[WorkerSlot], empty_since: Absences, now: float, after_s: float
) -> list[tuple[WorkerSlot, WorkerId]]:
    """Pair each slot that was empty for `after_s` with its successor: the live worker with the fewest runs.

    Without a live worker there is no successor, and what the dead ones had waits for them.
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
    """Pair each worker that has nothing left with its successor, which gets what it was to forget."""
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
