"""Concurrency limits per tenant in one process: slots, requests, body memory and uploads.

Requests for slots of one tenant are served in order of arrival. Tenants do not wait for one another.
"""

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


class TenantUse(Counter[TenantId]):
    """Amount of one resource that each tenant uses now in this process, up to a limit."""

    def __init__(self, refusal: Reason, most: int = 0, on_refusal: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._refusal = refusal
        self._most = most
        self._on_refusal = on_refusal

    @contextmanager
    def of(self, tenant: TenantId, amount: int = 0, *, most: int | None = None) -> Iterator[Callable[[int], None]]:
        """Use an amount until the end of the block. Yields a function that uses more.

        Both raise the refusal above the limit. The only block of a tenant may exceed it, because
        the size of one body is limited elsewhere.
        """
        limit, used = self._most if most is None else most, 0

        def use(more: int) -> None:
            nonlocal used
            if self[tenant] > used and self[tenant] + more > limit:
                self._on_refusal()
                raise Refused(self._refusal)
            used += more
            self[tenant] += more

        try:
            if amount:
                use(amount)
            yield use
        finally:
            self[tenant] -= used
            if not self[tenant]:
                del self[tenant]


#: Requests of a tenant, from the arrival of their bodies until they are answered. They include polls (`polls` of
#: `COTRAIN_QUOTAS` is 2,000). An SDK has at most a thousand concurrent requests of each kind.
MAX_REQUESTS = 4_000
#: Bytes of bodies until their requests are answered, as sent and as decompressed. SDKs have 50 MB of
#: passes in flight at once. A thousand slow senders may not occupy 64 GB.
MAX_BODY_BYTES = 512 * 1024**2
#: Uploads that are received at once; one is unpacked at a time.
MAX_UPLOADS = 2


def tenant_requests(most: int = MAX_REQUESTS) -> TenantUse:
    """Return a counter of requests that counts its refusals in the metrics."""
    refused = metrics.CONNECTIONS_REFUSED.labels("tenant")
    return TenantUse(Reason.TOO_MANY_CONNECTIONS, most, refused.inc)


def body_memory(max_bytes: int = MAX_BODY_BYTES) -> TenantUse:
    """Return a counter of the bytes of bodies."""
    return TenantUse(Reason.TOO_MANY_BODIES, max_bytes)
