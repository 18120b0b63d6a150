"""Whose turn it is among the tenants who wait for one worker: fair queueing by tokens. Pure.

It is handed from cycle to cycle, so that a cycle costs what changed since the last one and what it takes.
(What is copied for each are lists of references.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Set
from copy import copy
from dataclasses import dataclass

from cotrain_store.messages.fleet import WEIGHT
from cotrain_store.messages.ids import RunId, TenantId


@dataclass(frozen=True)
class PlannedPart:
    """A pass that was divided: how many of its tokens were planned up to now."""

    tenant: TenantId
    run: RunId
    seq: int
    tokens: int
    tokens_before: int


class FairQueue:
    """What each tenant was served, in tokens over its weight, and who of those who wait is next.

    Next is the tenant whose next part would end first. Who did not wait counts as served as much as the
    least served who did, if not more. Losing this (a scheduler restart) costs less than two quanta of
    fairness, so it is not stored.
    """

    def __init__(self, served: Mapping[TenantId, float] | None = None) -> None:
        """Begin with what some were served more than others who may come."""
        self._served: dict[TenantId, float] = dict(served or {})
        self._floor = 0.0
        """What the least served who waits had; it never falls."""
        self._parts: dict[TenantId, int] = {}
        """The next part of each who waits."""
        self._ends: list[tuple[float, TenantId]] = []
        """When it would end, sorted."""
        self._waits: list[tuple[float, TenantId]] = []
        """What those who wait were served, sorted."""
        self._weights: Mapping[TenantId, float] = {}
        self.quantum = 0
        """What the parts were made for; 0: they are to be made anew."""
        self.planned: tuple[PlannedPart, ...] = ()
        """What was counted as served before it ran."""

    def copy(self, *, is_current: bool = True) -> FairQueue:
        """Copy it, to be changed; unless it is current, every part in the copy is to be made anew."""
        other = copy(self)
        other._served, other._parts = dict(self._served), dict(self._parts)
        other._ends, other._waits = list(self._ends), list(self._waits)
        other.quantum = self.quantum if is_current else 0
        return other

    @property
    def next(self) -> tuple[TenantId, int] | None:
        """Say whose turn it is, and how large its part is."""
        return (self._ends[0][1], self._parts[self._ends[0][1]]) if self._ends else None

    @property
    def waiting(self) -> Set[TenantId]:
        """List who waits."""
        return self._parts.keys()

    def weigh(self, weights: Mapping[TenantId, float]) -> None:
        """Count each token as 1 / weight from now on; of tenants that have none of their own, as WEIGHT says."""
        if weights != self._weights:
            self._weights = weights
            self._ends = sorted((self._end(name), name) for name in self._parts)

    def wait(self, name: TenantId, part: int) -> None:
        """Let one wait for a part of so many tokens; with 0 it does not wait any more."""
        if name not in self._parts:
            if not part:
                return
            self._served[name] = max(self._served.get(name, 0), self._floor)
        elif self._parts[name] == part:
            return
        else:
            self._leave(name)
        if part:
            self._enter(name, part)

    def serve(self, name: TenantId, tokens: int, then_waits_for: int) -> None:
        """Count tokens as served; what does not wait any more, with 0, is remembered for a while."""
        if name in self._parts:
            self._leave(name)
        weight = self._weights.get(name, WEIGHT)
        self._served[name] = self._served.get(name, self._floor) + tokens / weight
        if then_waits_for:
            self._enter(name, then_waits_for)

    def correct(self, begun: Mapping[tuple[RunId, int], int]) -> None:
        """Count what ran of the passes that were divided: a worker runs whole slices, and stops in time.

        `begun` has the tokens of those that are still there; any other ended.
        """
        for part in self.planned:
            ran = begun.get((part.run, part.seq), part.tokens)
            self.serve(part.tenant, ran - part.tokens_before, self._parts.get(part.tenant, 0))
        self.planned = ()

    def end_cycle(self, planned: Iterable[PlannedPart]) -> None:
        """Forget who was served no more than the least served who waits; everyone, when none waits."""
        self.planned = tuple(planned)
        if not self._waits:
            self._served, self._floor = {}, 0.0
            return
        self._floor = max(self._floor, self._waits[0][0])
        if len(self._served) > 2 * len(self._parts):
            self._served = {
                name: served
                for name, served in self._served.items()
                if served > self._floor or name in self._parts
            }

    def _enter(self, name: TenantId, part: int) -> None:
        self._parts[name] = part
        insort(self._ends, (self._end(name), name))
        insort(self._waits, (self._served[name], name))

    def _leave(self, name: TenantId) -> None:
        del self._ends[bisect_left(self._ends, (self._end(name), name))]
        del self._waits[bisect_left(self._waits, (self._served[name], name))]
        del self._parts[name]

    def _end(self, name: TenantId) -> float:
        return self._served[name] + self._parts[name] / self._weights.get(name, WEIGHT)
