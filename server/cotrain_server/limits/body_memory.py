"""How much of one tenant's requests this process holds in its memory at once."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cotrain_server.errors import TooManyBodies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cotrain_store.messages.ids import TenantId

#: SDKs have 50 MB of passes on their way at once; a thousand slow senders may not have 64 GB.
MOST_BYTES = 512 * 1024**2


class BodyMemory:
    """Counts bodies from their first byte until their request is answered, as sent and as unpacked."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
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
            if used > taken and used + size > self._most_bytes:
                raise TooManyBodies
            taken += size
            self._bytes_by_tenant[tenant] += size

        try:
            yield take
        finally:
            self._bytes_by_tenant[tenant] -= taken
            if not self._bytes_by_tenant[tenant]:
                del self._bytes_by_tenant[tenant]
