"""What each tenant may have: the quotas of the settings, and over them what the operator granted it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cotrain_server.settings import Quotas
from cotrain_store.messages.ids import TenantId
from cotrain_store.oplog.submission import TenantLimits
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.sampling.intake import SampleLimits
from cotrain_store.tenants.policies import Policies
from cotrain_store.tenants.records import RecordLimits

#: What the operator changes holds in every API process after so long.
CACHE_S = 1.0
_CACHE_SIZE = 10_000


class OwnQuotas:
    """Reads what tenants were granted, of each at most once in CACHE_S."""

    def __init__(
        self, policies: Policies, defaults: Quotas, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.defaults = defaults
        self._policies = policies
        self._clock = clock
        self._known: dict[TenantId, tuple[float, Quotas]] = {}

    async def of(self, tenant: TenantId) -> Quotas:
        """Return a tenant's quotas, up to CACHE_S old; while Redis is away, as they were or the default ones."""
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
        """Read a tenant's quotas anew: they were changed."""
        self._known.pop(tenant, None)

    async def tenant_limits(self, tenant: TenantId) -> TenantLimits:
        """Say what a tenant may have waiting."""
        return (await self.of(tenant)).tenant_limits

    async def sample_limits(self, tenant: TenantId) -> SampleLimits:
        """Say what a tenant may have of sample requests."""
        return (await self.of(tenant)).sample_limits

    async def record_limits(self, tenant: TenantId) -> RecordLimits:
        """Say what a tenant may have of sessions, samplers and records."""
        return (await self.of(tenant)).record_limits
