"""Counter of wrong API keys per address, and a cache of the tenants of known credentials."""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from cotrain_server.errors import TooManyFailures
from cotrain_store.messages.ids import TenantId

FAILURES_PER_MINUTE = 10
_WINDOW_S = 60.0
_ADDRESSES_KEPT = 10_000


class FailureCounter:
    """Counts of wrong keys per address. A valid key always passes, because an office may share one
    address.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, address: str) -> None:
        """Count one failure. Raises TooManyFailures after FAILURES_PER_MINUTE of them."""
        now = self._clock()
        times = self._times_by_address.setdefault(address, deque(maxlen=FAILURES_PER_MINUTE))
        self._times_by_address.move_to_end(address)
        if len(self._times_by_address) > _ADDRESSES_KEPT:
            self._times_by_address.popitem(last=False)
        if len(times) == FAILURES_PER_MINUTE and now - times[0] < _WINDOW_S:
            raise TooManyFailures
        times.append(now)


#: Number of cached credentials, more than the clients of one process.
MAX_KNOWN = 20_000
_CREDENTIAL = re.compile(rb"\r\n(x-api-key|authorization):[ \t]*(?:bearer +)?([^\r\n]+)", re.I)


class KnownCredentials:
    """Cache of the tenant of each recent credential, for queueing only, not for authentication.

    It stores hashes, not the credentials. A request with an unknown credential shares the queue of
    its address, because otherwise each invented key would have a queue.
    """

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._tenants: OrderedDict[int, TenantId] = OrderedDict()

    def learn(self, credential: str, tenant: TenantId) -> None:
        """Cache the tenant of a credential, and evict the least recent one."""
        known = hash(credential.encode())
        self._tenants[known] = tenant
        self._tenants.move_to_end(known)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)

    def tenant_of(self, head: bytes) -> TenantId | None:
        """Return the tenant of a request from its first bytes, or None if unknown."""
        found = None
        for name, credential in _CREDENTIAL.findall(head.partition(b"\r\n\r\n")[0]):
            found = self._tenants.get(hash(credential.rstrip()))
            if name.lower() == b"x-api-key":
                break  # the same precedence as in authentication
        return found
