"""Tell the store which results were sent: they no longer count against their tenants' quotas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cotrain_store.redis_client.connection import ANY_TROUBLE, async_script
from cotrain_store.redis_client.subscription import note_trouble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ids import RequestId, TenantId
    from cotrain_store.redis_client.connection import Connection

#: Told together this often: one write for all that was sent meanwhile.
TELL_EVERY_S = 1.0
#: Redis does nothing else while it strikes these off.
_AT_ONCE = 1_000


class Unread:
    """What one API process has sent and not yet told. Losing it costs its tenants room until it expires."""

    def __init__(self, connection: Connection) -> None:
        self._sent: list[tuple[TenantId, RequestId]] = []
        self._script = async_script(connection, "ages", "unread", "results_sent")

    def note_sent(self, tenant: TenantId, request: RequestId) -> None:
        """Remember that a result was sent."""
        self._sent.append((tenant, request))

    async def tell(self) -> None:
        """Strike off what was sent. What Redis does not take now it is told later."""
        while self._sent:
            some = self._sent[:_AT_ONCE]
            try:
                await self._script([], [part for pair in some for part in pair])
            except ANY_TROUBLE as trouble:
                note_trouble("tell what was sent", trouble)
                return
            del self._sent[: len(some)]

    async def keep_telling(self) -> None:
        """Tell for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            await self.tell()


async def unread_bytes(connection: Connection, tenants: Sequence[TenantId]) -> dict[TenantId, int]:
    """Measure the results of tenants that were never sent, as their quotas count them."""
    sizes = await async_script(connection, "ages", "unread", "unread_bytes")([], list(tenants))
    return dict(zip(tenants, sizes, strict=True))
