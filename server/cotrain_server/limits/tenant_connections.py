"""How many connections of this process one tenant's requests hold at once."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cotrain_server.errors import TooManyConnections
from cotrain_store.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cotrain_store.messages.ids import TenantId

#: Its polls among them (`polls` of `COTRAIN_QUOTAS` is 2,000). An SDK has a thousand requests on their way at most, of each kind.
MOST = 4_000


class TenantConnections:
    """Counts a tenant's requests while their bodies arrive and until they are answered."""

    def __init__(self, most: int = MOST) -> None:
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
