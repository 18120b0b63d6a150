"""Weighted fair queue of the tenants of one worker. Pure.

It is passed from cycle to cycle, so a cycle costs only its planned ops and the changes since the last one.
(Copies for each cycle are lists of references.)
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
    """Split pass, with the number of its tokens planned so far."""

    tenant: TenantId
    run: RunId
    seq: int
    tokens: int
    tokens_before: int


class FairQueue:
    """Virtual time of each tenant (tokens served, divided by weight), and the next waiting tenant.

    The next tenant is the one whose next part would finish first. A tenant that starts to wait gets at least
    the smallest virtual time of the waiting ones. Losing this state (a scheduler restart) costs less than
    two quanta of fairness, so it is not stored.
    """

    def __init__(self, served: Mapping[TenantId, float] | None = None) -> None:
        """Start with the virtual times in `served`; other tenants start at 0."""
        self._served: dict[TenantId, float] = dict(served or {})
        self._floor = 0.0
        """Smallest virtual time of the waiting tenants; it never decreases."""
        self._parts: dict[TenantId, int] = {}
        """Tokens of the next part of each waiting tenant."""
        self._ends: list[tuple[float, TenantId]] = []
        """Virtual finish times of the next parts, sorted."""
        self._waits: list[tuple[float, TenantId]] = []
        """Virtual times of the waiting tenants, sorted."""
        self._weights: Mapping[TenantId, float] = {}
        self.quantum = 0
        """Quantum for which the parts were computed; 0 means they must be recomputed."""
        self.planned: tuple[PlannedPart, ...] = ()
        """Parts that were counted as served before they ran."""

    def copy(self, *, is_current: bool = True) -> FairQueue:
        """Return a mutable copy. If `is_current` is False, all parts must be recomputed."""
        other = copy(self)
        other._served, other._parts = dict(self._served), dict(self._parts)
        other._ends, other._waits = list(self._ends), list(self._waits)
        other.quantum = self.quantum if is_current else 0
        return other

    @property
    def next(self) -> tuple[TenantId, int] | None:
        """Return the next tenant, and the tokens of its next part."""
        return (self._ends[0][1], self._parts[self._ends[0][1]]) if self._ends else None

    @property
    def waiting(self) -> Set[TenantId]:
        """Return the waiting tenants."""
        return self._parts.keys()

    def weigh(self, weights: Mapping[TenantId, float]) -> None:
        """Set the weights: each token counts as 1 / weight. The default weight is WEIGHT."""
        if weights != self._weights:
            self._weights = weights
            self._ends = sorted((self._end(name), name) for name in self._parts)

    def wait(self, name: TenantId, part: int) -> None:
        """Set the next part of a tenant, in tokens; with 0 it no longer waits."""
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
        """Count tokens as served, and set the next part. With 0 the tenant no longer waits."""
        if name in self._parts:
            self._leave(name)
        weight = self._weights.get(name, WEIGHT)
        self._served[name] = self._served.get(name, self._floor) + tokens / weight
        if then_waits_for:
            self._enter(name, then_waits_for)

    def correct(self, begun: Mapping[tuple[RunId, int], int]) -> None:
        """Count the tokens that actually ran of split passes: a worker runs whole slices, and stops in time.

        `begun` contains the tokens done of the passes that are still open; all others have ended.
        """
        for part in self.planned:
            ran = begun.get((part.run, part.seq), part.tokens)
            self.serve(part.tenant, ran - part.tokens_before, self._parts.get(part.tenant, 0))
        self.planned = ()

    def end_cycle(self, planned: Iterable[PlannedPart]) -> None:
        """Drop tenants whose virtual time is not ahead of the minimum of waiting tenants; all if none waits."""
        self.planned = tuple(planned)
        if not self._waits:
            self._served, self._floor = {}, 0.0
            return
        self._floor = max(self._floor, self._waits[0][0])
        if len(self._served) > 2 * len(self._parts):
            self._served = {
                name: served for name, served in self._served.items() if served > self._floor or name in self._parts
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
