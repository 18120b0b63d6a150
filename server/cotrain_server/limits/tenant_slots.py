"""Concurrency limits per tenant in one process: slots, connections, body memory and uploads.

Requests for slots of one tenant are served in order of arrival. Tenants do not wait for one
another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics


class TenantSlots:
    """A fixed number of slots of this process for each tenant."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._slots_by_tenant: dict[TenantId, asyncio.Semaphore] = {}
        self._count_by_tenant: Counter[TenantId] = Counter()

    @asynccontextmanager
    async def of(self, tenant: TenantId) -> AsyncIterator[None]:
        """Hold one of the tenant's slots. Wait for it if necessary."""
        slots = self._slots_by_tenant.setdefault(tenant, asyncio.Semaphore(self._at_once))
        self._count_by_tenant[tenant] += 1
        try:
            async with slots:
                yield
        finally:
            self._count_by_tenant[tenant] -= 1
            if not self._count_by_tenant[tenant]:
                del self._count_by_tenant[tenant], self._slots_by_tenant[tenant]


#: Includes polls (`polls` of `COTRAIN_QUOTAS` is 2,000). An SDK has at most a thousand concurrent
#: requests of each kind.
LIMITS = 4_000


class TenantConnections:
    """Counter of a tenant's requests, from the arrival of their bodies until they are answered."""

    def __init__(self, most: int = LIMITS) -> None:
        self._most = most
        self._count_by_tenant: Counter[TenantId] = Counter()

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[None]:
        """Count one request. Raises TOO_MANY_CONNECTIONS above the limit."""
        if self._count_by_tenant[tenant] >= self._most:
            metrics.CONNECTIONS_REFUSED.labels("tenant").inc()
            raise Refused(Reason.TOO_MANY_CONNECTIONS)
        self._count_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._count_by_tenant[tenant] -= 1
            if not self._count_by_tenant[tenant]:
                del self._count_by_tenant[tenant]


#: SDKs have 50 MB of passes in flight at once. A thousand slow senders may not occupy 64 GB.
MAX_BYTES = 512 * 1024**2


class BodyMemory:
    """Counter of body bytes from the first byte until the request is answered, as sent and as
    decompressed.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes_by_tenant: Counter[TenantId] = Counter()

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts the bytes of one body. It raises TOO_MANY_BODIES above the
        limit.

        A tenant's only body is always accepted, because its size is limited elsewhere.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            used = self._bytes_by_tenant[tenant]
            if used > taken and used + size > self._max_bytes:
                raise Refused(Reason.TOO_MANY_BODIES)
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
    """Upload slots of one process: several uploads are received at once, one is unpacked."""

    def __init__(self) -> None:
        self.unpacking = asyncio.Lock()
        self._count_by_tenant = Counter[str]()

    @contextmanager
    def slot(self, tenant: TenantId) -> Iterator[None]:
        """Count an upload of a tenant while it lasts. Raises TOO_MANY_UPLOADS."""
        if self._count_by_tenant[tenant] >= UPLOADS_PER_TENANT:
            raise Refused(Reason.TOO_MANY_UPLOADS)
        self._count_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._count_by_tenant[tenant] -= 1
