"""Limits in one API process: requests started at once, a tenant's slots and uses, and wrong keys of an address."""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from cotrain_server.errors import TooManyFailures
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics

#: Requests that start, or read their next block, in one iteration of the event loop. One takes up to a millisecond.
AT_ONCE = 2

#: Requests of a tenant, from the arrival of their bodies until they are answered. They include polls (`polls` of
#: `COTRAIN_QUOTAS` is 2,000). An SDK has at most a thousand concurrent requests of each kind.
MAX_REQUESTS = 4_000
#: Bytes of bodies until their requests are answered, as sent and as decompressed. SDKs have 50 MB of
#: passes in flight at once. A thousand slow senders may not occupy 64 GB.
MAX_BODY_BYTES = 512 * 1024**2
#: Uploads that are received at once; one is unpacked at a time.
MAX_UPLOADS = 2

WRONG_KEYS_PER_MINUTE = 10
_WINDOW_S = 60.0
_ADDRESSES_KEPT = 10_000


class LoopSlots:
    """Slots of requests in order of arrival, AT_ONCE in each iteration of the event loop.

    The event loop runs everything that is ready in one iteration. 500 requests that arrive together would take half a
    second. The answer to a heartbeat needs several iterations.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._is_renewing = False

    async def take(self) -> None:
        """Return when the caller has a slot: at once, if one is left in this iteration, else in a later one."""
        if self._left:
            self._left -= 1
            self._renew_soon()
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        await slot

    def _renew_soon(self) -> None:
        if not self._is_renewing:
            self._is_renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._is_renewing = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            slot = self._waiting.popleft()
            if not slot.done():  # its client has not disconnected
                slot.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._renew_soon()


class TenantUse(Counter[TenantId]):
    """Amount of one resource that each tenant uses now, up to a limit."""

    def __init__(self, refusal: Reason, limit: int = 0, on_refusal: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._refusal = refusal
        self._limit = limit
        self._on_refusal = on_refusal

    @contextmanager
    def of(self, tenant: TenantId, amount: int = 0, *, limit: int | None = None) -> Iterator[Callable[[int], None]]:
        """Use an amount until the end of the block. Yields a function that uses more.

        Both raise the refusal above the limit. A tenant without another block may exceed it, because the size of one
        body is limited elsewhere.
        """
        limit, used = self._limit if limit is None else limit, 0

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


def tenant_requests(limit: int = MAX_REQUESTS) -> TenantUse:
    """Return a counter of requests that counts its refusals in the metrics."""
    refused = metrics.CONNECTIONS_REFUSED.labels("tenant")
    return TenantUse(Reason.TOO_MANY_CONNECTIONS, limit, refused.inc)


def body_memory(max_bytes: int = MAX_BODY_BYTES) -> TenantUse:
    """Return a counter of the bytes of bodies."""
    return TenantUse(Reason.TOO_MANY_BODIES, max_bytes)


class TenantSlots:
    """A fixed number of slots for each tenant, in order of arrival. Tenants do not wait for one another."""

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


class WrongKeyCounter:
    """Counts of wrong keys per address. A valid key always passes, because an office may share one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, address: str) -> None:
        """Count one wrong key. Raises TooManyFailures after WRONG_KEYS_PER_MINUTE of them."""
        now = self._clock()
        times = self._times_by_address.setdefault(address, deque(maxlen=WRONG_KEYS_PER_MINUTE))
        self._times_by_address.move_to_end(address)
        if len(self._times_by_address) > _ADDRESSES_KEPT:
            self._times_by_address.popitem(last=False)
        if len(times) == WRONG_KEYS_PER_MINUTE and now - times[0] < _WINDOW_S:
            raise TooManyFailures
        times.append(now)
