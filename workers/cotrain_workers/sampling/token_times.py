"""How long sample requests waited, when their tokens came, and whose the device's time was while they did.

A step gives hundreds of sequences a token each, most of them as long after the one before: such are counted at once.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_store.messages.ids import TenantId
    from cotrain_store.monitoring.worker_metrics import WorkerMetrics
    from cotrain_workers.engine.decoding.requests import NewTokens


@dataclass
class _Times:
    """Of one request."""

    tenant: TenantId
    accepted_at: float
    last: dict[int, float] = field(default_factory=dict)
    """Sequence → when its last token came."""


class TokenTimes:
    """Counts what a decoder's steps show. For one thread."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._wall = wall
        self._clock = clock
        self._requests: dict[str, _Times] = {}

    def accept(self, request: str, tenant: TenantId, accepted_at: float) -> None:
        """Take a request that was claimed."""
        self._requests[request] = _Times(tenant, accepted_at)

    def begin(self, request: str) -> None:
        """Note that it goes to the decoder."""
        self._metrics.sample_queue.observe(self._since(self._requests[request].accepted_at))

    def step(self, tokens: Sequence[NewTokens], seconds: float) -> None:
        """Count a step: the tokens it gave, and its time, which is its tenants' by their tokens.

        A step without tokens computed prompts: its time is shared among all requests alike.
        """
        now = self._clock()
        gaps: defaultdict[float, int] = defaultdict(int)
        given: defaultdict[TenantId, int] = defaultdict(int)
        for new in tokens:
            times = self._requests[new.request]
            last = times.last.get(new.sequence)
            if last is not None:
                gaps[(now - last) / len(new.tokens)] += len(new.tokens)
            elif not times.last:
                self._metrics.first_token.observe(self._since(times.accepted_at))
            times.last[new.sequence] = now
            given[times.tenant] += len(new.tokens)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)
        shares = given or Counter(times.tenant for times in self._requests.values())
        in_all = sum(shares.values())
        for tenant, share in shares.items():
            self._metrics.used_device(tenant, seconds * share / in_all)

    def end(self, request: str) -> None:
        """Forget a request."""
        self._requests.pop(request, None)

    def _since(self, accepted_at: float) -> float:
        return max(0.0, self._wall() - accepted_at)  # clocks of two hosts may differ
