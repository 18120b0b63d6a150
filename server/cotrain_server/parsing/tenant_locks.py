"""One at a time for each tenant, in the order in which they came; tenants do not wait for one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cotrain_store.messages.ids import TenantId


class TenantLocks:
    """One lock of this process for each tenant that uses it."""

    def __init__(self) -> None:
        self._lock_by_tenant: dict[TenantId, asyncio.Lock] = {}
        self._count_by_tenant: Counter[TenantId] = Counter()

    @asynccontextmanager
    async def of(self, tenant: TenantId) -> AsyncIterator[None]:
        """Hold the tenant's lock."""
        lock = self._lock_by_tenant.setdefault(tenant, asyncio.Lock())
        self._count_by_tenant[tenant] += 1
        try:
            async with lock:
                yield
        finally:
            self._count_by_tenant[tenant] -= 1
            if not self._count_by_tenant[tenant]:
                del self._count_by_tenant[tenant], self._lock_by_tenant[tenant]
