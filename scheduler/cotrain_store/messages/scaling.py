"""How many workers a pool is to have: what its work needs, held steady so that an autoscaler does not go to and fro.

Pure. The scheduler that leads decides, and keeps the last decision as a record of the pool, which every API process
shows and the next scheduler goes on from. Times are those of hosts, in s since 1970.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from cotrain_store.messages.ids import WorkerId

if TYPE_CHECKING:
    from collections.abc import Mapping

#: More workers are wanted once so many were needed for this long; the first one at once.
UP_AFTER_S = 30.0
#: Fewer are wanted once no more were needed for this long.
DOWN_AFTER_S = 300.0
#: What was needed is remembered by the least and the most of so long.
SPAN_S = 10.0
#: A record that is older says nothing: no scheduler leads.
STALE_S = 30.0


NOTHING: Mapping[WorkerId, int] = MappingProxyType({})


@dataclass(frozen=True)
class Bounds:
    """What the operator allows, for each pool."""

    least: int = 1
    """0: a pool without work has no worker."""
    most: int = 0
    """0: no limit."""
    idle_s: float = 900.0
    """A pool that had nothing to do for so long has no work."""

    def within(self, workers: int) -> int:
        """Bring a number of workers within the bounds."""
        raised = max(workers, self.least)
        return min(raised, self.most) if self.most else raised


@dataclass(frozen=True)
class Span:
    """The least and the most workers that were needed in SPAN_S."""

    start: float
    least: int
    most: int


@dataclass(frozen=True)
class Scaling:
    """How many workers are wanted, and what that is decided by."""

    wanted: int
    at: float
    """When this was decided."""
    busy_at: float
    """When something was last to be done."""
    bounds: Bounds = field(default_factory=Bounds)
    spans: tuple[Span, ...] = ()
    """Of the last DOWN_AFTER_S, oldest first."""
    waiting_tokens: Mapping[WorkerId, int] = field(default_factory=dict)
    """Of each worker, as the scheduler knew them when it last planned."""

    def after(
        self,
        needed: int,
        now: float,
        bounds: Bounds,
        waiting_tokens: Mapping[WorkerId, int] = NOTHING,
    ) -> Scaling:
        """Decide anew, from what is needed now. After a clock that was set back the times begin anew."""
        spans = _noted(() if now < self.at else self.spans, needed, now)
        busy_at = now if needed else min(self.busy_at, now)
        wanted = max(self.wanted, min(needed, 1))
        if _covers(spans, now, UP_AFTER_S):
            lately = [span.least for span in spans if span.start + SPAN_S > now - UP_AFTER_S]
            wanted = max(wanted, min(lately))
        if _covers(spans, now, DOWN_AFTER_S):
            wanted = min(wanted, max(span.most for span in spans))
        if wanted == 0 < self.wanted and now - busy_at < bounds.idle_s:
            wanted = 1  # the last one stays for longer
        return Scaling(bounds.within(wanted), now, busy_at, bounds, spans, dict(waiting_tokens))

    def differs(self, other: Scaling, after_s: float) -> bool:
        """Tell whether this is news to those who know the other one, or that one is so old."""
        mine = self.wanted, self.bounds, self.waiting_tokens
        theirs = other.wanted, other.bounds, other.waiting_tokens
        return mine != theirs or not 0 <= self.at - other.at < after_s

    def is_current(self, now: float) -> bool:
        """Tell whether a scheduler decided this lately."""
        return abs(now - self.at) < STALE_S


def first_scaling(workers: int, now: float, bounds: Bounds) -> Scaling:
    """Begin with the workers there are, as if they had had work until now."""
    return Scaling(bounds.within(workers), now, now, bounds)


def parse_scaling(row: bytes | None) -> Scaling | None:
    """Read a record; None where there is none."""
    if row is None:
        return None
    found = json.loads(row)
    return Scaling(
        wanted=int(found["wanted"]),
        at=float(found["at"]),
        busy_at=float(found["busy_at"]),
        bounds=Bounds(**found["bounds"]),
        spans=tuple(Span(**span) for span in found["spans"]),
        waiting_tokens={WorkerId(name): n for name, n in found["waiting_tokens"].items()},
    )


def _noted(spans: tuple[Span, ...], needed: int, now: float) -> tuple[Span, ...]:
    kept = tuple(span for span in spans if span.start + SPAN_S > now - DOWN_AFTER_S)
    if kept and now < kept[-1].start + SPAN_S:
        last = kept[-1]
        grown = Span(last.start, min(last.least, needed), max(last.most, needed))
        return (*kept[:-1], grown)
    return (*kept, Span(now, needed, needed))


def _covers(spans: tuple[Span, ...], now: float, duration_s: float) -> bool:
    """Tell whether spans say what was needed since `duration_s` ago, to within one of them."""
    return now - spans[0].start >= duration_s - SPAN_S
