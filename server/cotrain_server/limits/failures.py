"""How often an address may show a wrong key.

Whose a request is, as far as its first bytes tell: enough to queue it with its tenant's, not to let it in.
"""

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
    """Counts wrong keys per address. A right key always passes: an office shares one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, address: str) -> None:
        """Count one failure; raises TooManyFailures after FAILURES_PER_MINUTE of them."""
        now = self._clock()
        times = self._times_by_address.setdefault(address, deque(maxlen=FAILURES_PER_MINUTE))
        self._times_by_address.move_to_end(address)
        if len(self._times_by_address) > _ADDRESSES_KEPT:
            self._times_by_address.popitem(last=False)
        if len(times) == FAILURES_PER_MINUTE and now - times[0] < _WINDOW_S:
            raise TooManyFailures
        times.append(now)


#: Credentials whose tenant is remembered: more than there are clients at one process.
MAX_KNOWN = 20_000
_CREDENTIAL = re.compile(rb"\r\n(x-api-key|authorization):[ \t]*(?:bearer +)?([^\r\n]+)", re.I)


class KnownCredentials:
    """Which tenant a credential opened last. No credential is kept, but what tells it from others.

    A request with an unknown one is queued with all others of its address: else each invented key had a queue.
    """

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._tenants: OrderedDict[int, TenantId] = OrderedDict()

    def learn(self, credential: str, tenant: TenantId) -> None:
        """Note that it opened this tenant; the one learnt longest ago makes way."""
        known = hash(credential.encode())
        self._tenants[known] = tenant
        self._tenants.move_to_end(known)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)

    def tenant_of(self, head: bytes) -> TenantId | None:
        """Find the tenant of a request by the first bytes of it; None where it is not known."""
        found = None
        for name, credential in _CREDENTIAL.findall(head.partition(b"\r\n\r\n")[0]):
            found = self._tenants.get(hash(credential.rstrip()))
            if name.lower() == b"x-api-key":
                break  # as it is authenticated
        return found
