"""Decide which dead or drained worker's work goes to whom. Pure; times in seconds, `now` comes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from cotrain_store.messages.ids import WorkerId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot

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
        if slot.heartbeat and slot.heartbeat.hands_over and slot.heartbeat.state == "drained"
    ]


def _runs(worker: WorkerHeartbeat) -> tuple[int, WorkerId]:
    return worker.runs, worker.id
