"""Quotas of each tenant: the defaults of the settings, overridden by the operator's grants."""

import math
import time
from collections.abc import Callable

from cotrain_server.settings import Quotas
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.sampling.intake import SampleLimits
from cotrain_store.tenants.policies import Policies, TenantLimits
from cotrain_store.tenants.records import RecordLimits

#: Maximum delay until a change by the operator takes effect in every API process, in seconds.
CACHE_S = 1.0
_CACHE_SIZE = 10_000


class OwnQuotas:
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
            quotas = self.defaults.over(await self._policies.limits(tenant))
        except CONNECTION_LOST:
            return quotas
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._known[tenant] = self._clock(), quotas
        return quotas

    def forget(self, tenant: TenantId) -> None:
        """Drop a tenant's cached quotas after a change."""
        self._known.pop(tenant, None)

    async def tenant_limits(self, tenant: TenantId) -> TenantLimits:
        """Return the limits on a tenant's pending requests."""
        return (await self.of(tenant)).tenant_limits

    async def sample_limits(self, tenant: TenantId) -> SampleLimits:
        """Return the limits on a tenant's sample requests."""
        return (await self.of(tenant)).sample_limits

    async def record_limits(self, tenant: TenantId) -> RecordLimits:
        """Return the limits on a tenant's sessions, samplers and records."""
        return (await self.of(tenant)).record_limits
