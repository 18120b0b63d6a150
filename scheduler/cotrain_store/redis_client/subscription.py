"""Listen to one channel for as long as a process lives, whatever Redis does meanwhile.

A message can be lost while the subscription is down: after each (re)subscription whoever listens is
told to look at everything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from cotrain_store.redis_client.connection import ANY_TROUBLE, CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cotrain_store.redis_client.connection import Connection

log = structlog.get_logger()

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
        except ANY_TROUBLE as trouble:
            note_trouble(f"listen {channel}", trouble)
            await asyncio.sleep(RETRY_S)


async def repeat(name: str, every_s: float, turn: Callable[[], Awaitable[None]]) -> None:
    """Take a turn every `every_s` seconds. Runs until cancelled: what Redis refuses ends one turn."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await turn()
        except ANY_TROUBLE as trouble:
            note_trouble(name, trouble)


def note_trouble(name: str, trouble: Exception) -> None:
    """Log what Redis said, unless it is only away: others tell that, and it passes."""
    if not isinstance(trouble, CONNECTION_LOST):
        log.error("redis_refuses", task=name, error=str(trouble))
