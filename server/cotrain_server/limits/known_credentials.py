"""Whose a request is, as far as its first bytes tell: enough to queue it with its tenant's, not to let it in."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import TenantId

#: Credentials whose tenant is remembered: more than there are clients at one process.
MOST_KNOWN = 20_000
_CREDENTIAL = re.compile(rb"\r\n(x-api-key|authorization):[ \t]*(?:bearer +)?([^\r\n]+)", re.I)


class KnownCredentials:
    """Which tenant a credential opened last. No credential is kept, but what tells it from others.

    A request with an unknown one is queued with all others of its address: else each invented key had a queue.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
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
