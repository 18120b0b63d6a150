"""Decide which dead worker's work goes to whom. Pure; times in seconds, `now` comes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from cotrain_store.messages.ids import WorkerId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cotrain_store.oplog.dispatch import Place, WorkerBeat

#: Since when a place is empty, by its worker and the epoch of who was there last.
Absences: TypeAlias = Mapping[tuple[WorkerId, int], float]


def absences(places: Iterable[Place], before: Absences, now: float) -> Absences:
    """Note since when places are empty; somebody who came and went in between starts it anew."""
    empty = [(place.worker, place.epoch) for place in places if place.beat is None]
    return {name: before.get(name, now) for name in empty}


def inheritances(
    places: Sequence[Place], empty_since: Absences, now: float, after_s: float
) -> list[tuple[Place, WorkerId]]:
    """Pair each place that was empty for `after_s` with its heir: the living one with the fewest runs.

    Without anybody alive there is no heir, and what is there waits for its own worker.
    """
    alive = [place.beat for place in places if place.beat is not None]
    if not alive:
        return []
    heir = min(alive, key=_runs).id
    return [
        (place, heir)
        for place in places
        if now - empty_since.get((place.worker, place.epoch), now) >= after_s
    ]


def _runs(beat: WorkerBeat) -> tuple[int, WorkerId]:
    return beat.runs, beat.id
