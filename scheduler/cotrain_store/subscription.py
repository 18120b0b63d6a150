"""Listen to one channel for as long as a process lives, whatever Redis does meanwhile.

A message can be lost while the subscription is down: after each (re)subscription whoever listens is
told to look at everything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cotrain_store.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cotrain_store.connection import Connection

#: How soon to ask a Redis again that went away.
RETRY_S = 0.2


async def listen(
    connection: Connection, channel: str, heard: Callable[[bytes | None], Awaitable[None]]
) -> None:
    """Call `heard` with each message, and with None after each subscription. Runs until cancelled."""
    while True:
        try:
            async with connection.pubsub(ignore_subscribe_messages=False) as subscription:
                await subscription.subscribe(channel)
                async for message in subscription.listen():
                    await heard(None if message["type"] == "subscribe" else message["data"])
        except CONNECTION_LOST:
            await asyncio.sleep(RETRY_S)
