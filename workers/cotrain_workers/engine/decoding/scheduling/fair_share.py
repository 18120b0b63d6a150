"""Whose work a decoder step takes next: of the tenant that would then have had the fewest tokens over its weight. Pure.

What it would have had then, not what it has had: so one that generates a token per step waits for no page of another's prompt.
Weighted fair queueing orders packets so, by when each would end (Demers, Keshav, Shenker 1989).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")


class FairShare:
    """Counts the tokens over its weight that each tenant was given; what one could not use is not saved up."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._weights: Mapping[str, float] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """Note which tenants have work, and their weights. One that is new begins level with who has had least."""
        known = self._tokens
        least = min((known[tenant] for tenant in weights if tenant in known), default=0.0)
        self._tokens = {tenant: known.get(tenant, least) for tenant in weights}
        self._weights = weights

    def give(self, tenant: str, tokens: int) -> None:
        """Count what a tenant was given."""
        self._tokens[tenant] += tokens / self._weights[tenant]

    def in_order(
        self, work: Mapping[str, deque[T]], tokens_of: Callable[[T], int]
    ) -> Iterator[tuple[str, T]]:
        """Take work out of `work`, of the tenant that would then have had the fewest tokens over its weight.

        What is given while this waits counts for what comes next.
        """

        def end(tenant: str) -> float:
            return self._tokens[tenant] + tokens_of(work[tenant][0]) / self._weights[tenant]

        heap = [(end(tenant), at, tenant) for at, tenant in enumerate(work)]
        heapify(heap)
        while heap:
            _, at, tenant = heappop(heap)
            yield tenant, work[tenant].popleft()
            if work[tenant]:
                heappush(heap, (end(tenant), at, tenant))

    def end(self, left: Mapping[str, deque[T]]) -> None:
        """End a step: who had all its work done is level with the one that has had the fewest of the others."""
        short = {tenant for tenant, work in left.items() if work}
        level = [self._tokens[tenant] for tenant in short] or [
            max(self._tokens.values(), default=0.0)
        ]
        for tenant, tokens in self._tokens.items():
            if tenant not in short:
                self._tokens[tenant] = max(tokens, min(level))
