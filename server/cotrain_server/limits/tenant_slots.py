"""A few at a time for each tenant, in the order in which they came; tenants do not wait for one another.

How many connections of this process one tenant's requests hold at once.

How much of one tenant's requests this process holds in its memory at once.

How many uploads one tenant may send at once, and one process unpack.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from cotrain_server.errors import TooManyBodies, TooManyConnections, TooManyUploads
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics


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


#: Its polls among them (`polls` of `COTRAIN_QUOTAS` is 2,000). An SDK has a thousand requests on their way at most, of each kind.
LIMITS = 4_000


class TenantConnections:
    """Counts a tenant's requests while their bodies arrive and until they are answered."""

    def __init__(self, most: int = LIMITS) -> None:
        self._most = most
        self._count_by_tenant: Counter[TenantId] = Counter()

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[None]:
        """Count one; raises TooManyConnections over the limit."""
        if self._count_by_tenant[tenant] >= self._most:
            metrics.CONNECTIONS_REFUSED.labels("tenant").inc()
            raise TooManyConnections
        self._count_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._count_by_tenant[tenant] -= 1
            if not self._count_by_tenant[tenant]:
                del self._count_by_tenant[tenant]


#: SDKs have 50 MB of passes on their way at once; a thousand slow senders may not have 64 GB.
MAX_BYTES = 512 * 1024**2


class BodyMemory:
    """Counts bodies from their first byte until their request is answered, as sent and as unpacked."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes_by_tenant: Counter[TenantId] = Counter()

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[Callable[[int], None]]:
        """Give what counts the bytes of one body; it raises TooManyBodies over the limit.

        One that is alone is always let in: how large it may be is limited elsewhere.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            used = self._bytes_by_tenant[tenant]
            if used > taken and used + size > self._max_bytes:
                raise TooManyBodies
            taken += size
            self._bytes_by_tenant[tenant] += size

        try:
            yield take
        finally:
            self._bytes_by_tenant[tenant] -= taken
            if not self._bytes_by_tenant[tenant]:
                del self._bytes_by_tenant[tenant]


UPLOADS_PER_TENANT = 2


class UploadSlots:
    """What one process holds of uploads: some are received, one is unpacked."""

    def __init__(self) -> None:
        self.unpacking = asyncio.Lock()
        self._count_by_tenant = Counter[str]()

    @contextmanager
    def slot(self, tenant: TenantId) -> Iterator[None]:
        """Count an upload of a tenant while it lasts; raises TooManyUploads."""
        if self._count_by_tenant[tenant] >= UPLOADS_PER_TENANT:
            raise TooManyUploads
        self._count_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._count_by_tenant[tenant] -= 1
