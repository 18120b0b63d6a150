"""A few at a time for each tenant, in the order in which they came; tenants do not wait for one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cotrain_store.messages.ids import TenantId


class TenantSlots:
    """So many slots of this process for each tenant that uses them."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._slots_by_tenant: dict[TenantId, asyncio.Semaphore] = {}
        self._count_by_tenant: Counter[TenantId] = Counter()

    @asynccontextmanager
    async def of(self, tenant: TenantId) -> AsyncIterator[None]:
        """Hold one of the tenant's slots; waits for it."""
        slots = self._slots_by_tenant.setdefault(tenant, asyncio.Semaphore(self._at_once))
        self._count_by_tenant[tenant] += 1
        try:
            async with slots:
                yield
        finally:
            self._count_by_tenant[tenant] -= 1
            if not self._count_by_tenant[tenant]:
                del self._count_by_tenant[tenant], self._slots_by_tenant[tenant]
