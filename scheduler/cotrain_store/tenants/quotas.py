"""Quotas of tenants: the defaults of the settings, overridden by the operator's grants."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import HISTORY_POINTS
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.policies import Policies

#: Lua scripts count exactly up to 2**53.
MAX_LIMIT = 10**15
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_LIMIT)]

#: Maximum delay until a change by the operator takes effect in every API process, in seconds.
CACHE_S = 1.0
_CACHE_SIZE = 10_000


class Quotas(BaseModel):
    """Quotas of one tenant. Requests above them are refused or wait, see docs/operate/limits.md.

    The pages show the sentences of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    ops: AtLeastOne = 512
    """Training requests that wait, per base model."""
    tokens: AtLeastOne = 8_000_000
    """Tokens of these requests."""
    bytes: AtLeastOne = 1_000_000_000
    """Bytes of these requests."""
    runs: AtLeastOne = 1_000
    """Live runs."""
    run_bytes: Annotated[int, Field(ge=0, le=MAX_LIMIT)] = 0
    """Bytes of live runs, each with its state once in memory and twice on disk. 0: 200 GB or, if
    larger, eight runs of the largest rank on the largest base model.
    """
    unread_bytes: AtLeastOne = 2_000_000_000
    """Bytes of unfetched results. Above it, new requests are refused."""
    record_bytes: AtLeastOne = 200_000_000
    """Bytes of sessions and runs with their metadata, including ended ones: Redis keeps them in memory."""
    history_points: AtLeastOne = HISTORY_POINTS
    """Points of the histories of all runs, about 80 bytes each in Redis. Above it, the least
    recently extended histories are deleted. Applied from the next run on.
    """
    sessions: AtLeastOne = 10_000
    """Sessions with a live client."""
    samplers: AtLeastOne = 10_000
    """Samplers with a live client."""
    sampler_bytes: AtLeastOne = 100_000_000_000
    """Bytes of weights from saves without a name. Above it, samplers unused for half an hour are replaced by new ones.
    """
    polls: AtLeastOne = 2_000
    """Open requests that wait for a result, per API process."""
    samples: AtLeastOne = 2_000
    """Sample requests that are waiting or running. Above it, clients slow down."""
    sample_tokens: AtLeastOne = 16_000_000
    """Maximum tokens of these requests: prompts plus `num_samples` times `max_tokens`. Above it, clients slow down."""
    checkpoints: AtLeastOne = 10_000
    """Stored checkpoints. Above it, saves fail."""
    checkpoint_bytes: AtLeastOne = 100_000_000_000
    """Bytes of stored checkpoints. Above it, saves fail."""

    def with_overrides(self, own: Mapping[str, int]) -> Quotas:
        """Return these quotas overridden by a tenant's own. Names of other versions are ignored."""
        return self.model_copy(update={n: v for n, v in own.items() if n in Quotas.model_fields})


QuotasOf: TypeAlias = Callable[[TenantId], Awaitable[Quotas]]
"""Function that returns the current quotas of a tenant."""


async def default_quotas(_: TenantId) -> Quotas:
    """Return the same quotas for every tenant."""
    return Quotas()


class CachedQuotas:
    """Cached quotas of tenants, each read at most once per CACHE_S."""

    def __init__(self, policies: Policies, defaults: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self.defaults = defaults
        self._policies = policies
        self._clock = clock
        self._known: dict[TenantId, tuple[float, Quotas]] = {}

    async def of(self, tenant: TenantId) -> Quotas:
        """Return a tenant's quotas, up to CACHE_S old. If Redis is unavailable, return the last known or default ones."""
        at, quotas = self._known.get(tenant, (-math.inf, self.defaults))
        if self._clock() - at < CACHE_S:
            return quotas
        try:
            quotas = self.defaults.with_overrides(await self._policies.limits(tenant))
        except CONNECTION_LOST:
            return quotas
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._known[tenant] = self._clock(), quotas
        return quotas

    def forget(self, tenant: TenantId) -> None:
        """Drop a tenant's cached quotas after a change."""
        self._known.pop(tenant, None)
