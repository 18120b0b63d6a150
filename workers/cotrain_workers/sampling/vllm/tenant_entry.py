"""Who may send a sequence to the server next: the tenant that has the fewest there.

What has been sent is the server's, and is not taken back. So of all places a part is kept for tenants that
have none: one that has many waits before it fills the server, and a newcomer goes in at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Of all places, the part that only tenants without a sequence at the server may take.
KEPT_SHARE = 16


class TenantEntry:
    """Places for `count` sequences, given to tenants by turns; for one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._kept = count // KEPT_SHARE
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place for one sequence of a tenant; its own sequences enter in order."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(admitted)
        self._let_in()
        try:
            await admitted
            yield
        finally:
            if admitted.done() and not admitted.cancelled():
                self._free += 1
                self._inside[tenant] -= 1
            self._let_in()

    def _let_in(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            admitted = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if admitted.done():  # it was cancelled
                continue
            self._free -= 1
            self._inside[tenant] += 1
            admitted.set_result(None)
        self._inside += Counter()  # forgets those that have none

    def _next(self) -> str | None:
        tenant = min(self._waiting, key=self._inside.__getitem__, default=None)
        if tenant is None or (self._inside[tenant] and self._free <= self._kept):
            return None
        return tenant
