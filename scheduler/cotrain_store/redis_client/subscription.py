"""Listen to one channel for as long as a process lives, even while Redis is unavailable.

A message can be lost while the subscription is down: after each (re)subscription the subscriber looks at
everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Self

import structlog

from cotrain_store.redis_client.connection import (
    ANY_TROUBLE,
    CONNECTION_LOST,
    Connection,
    stop_tasks,
)
from cotrain_store.redis_client.refusals import NEEDS_OPERATOR

log = structlog.get_logger()

#: How soon to ask an unavailable Redis again.
RETRY_S = 0.2


class ChannelSubscriber:
    """Calls `receive` with each message of a channel, and with None after each subscription.

    `others` are tasks that run as long.
    """

    def __init__(
        self,
        connection: Connection,
        channel: str,
        receive: Callable[[bytes | None], Awaitable[None]],
        *others: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        listening = partial(_listen, connection, channel, receive)
        self._coroutines: list[Callable[[], Coroutine[Any, Any, None]]] = [listening, *others]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start listening."""
        self._tasks = [asyncio.create_task(coroutine()) for coroutine in self._coroutines]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and the other tasks."""
        await stop_tasks(self._tasks)


async def _listen(
    connection: Connection, channel: str, receive: Callable[[bytes | None], Awaitable[None]]
) -> None:
    while True:
        try:
            async with connection.pubsub(ignore_subscribe_messages=False) as subscription:
                await subscription.subscribe(channel)
                async for message in subscription.listen():
                    await receive(None if message["type"] == "subscribe" else message["data"])
        except ANY_TROUBLE as trouble:
            note_trouble(f"listen {channel}", trouble)
            await asyncio.sleep(RETRY_S)


async def repeat(name: str, every_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Act every `every_s` seconds. Runs until cancelled: an error of Redis ends one call."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await act()
        except ANY_TROUBLE as trouble:
            note_trouble(name, trouble)


def note_trouble(name: str, trouble: Exception) -> None:
    """Log an error of Redis, unless it is unavailable or full: others log that, and it passes."""
    if isinstance(trouble, NEEDS_OPERATOR) or not isinstance(trouble, CONNECTION_LOST):
        log.error("redis_error", task=name, error=str(trouble))
