"""Permanent subscription to one channel, renewed after Redis was unavailable.

Messages are lost while the subscription is down. After each (re)subscription the subscriber must therefore
reload everything.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Self

import structlog

from cotrain_store.redis_client.connection import ANY_TROUBLE, CONNECTION_LOST, Connection, stop_tasks
from cotrain_store.redis_client.refusals import NEEDS_OPERATOR

log = structlog.get_logger()

#: Wait in s before a retry while Redis is unavailable.
RETRY_S = 0.2


class ChannelSubscriber:
    """Subscriber that calls `receive` with each message of a channel, and with None after each subscription.

    `others` are tasks that run during the same time.
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
        """Start the subscription and the other tasks."""
        self._tasks = [asyncio.create_task(coroutine()) for coroutine in self._coroutines]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the subscription and the other tasks."""
        await stop_tasks(self._tasks)


async def _listen(connection: Connection, channel: str, receive: Callable[[bytes | None], Awaitable[None]]) -> None:
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
    """Call `act` every `every_s` seconds until cancelled. An error of Redis ends only one call."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await act()
        except ANY_TROUBLE as trouble:
            note_trouble(name, trouble)


def note_trouble(name: str, trouble: Exception) -> None:
    """Log an error of Redis. Transient unavailability or full memory is not logged here, but by others."""
    if isinstance(trouble, NEEDS_OPERATOR) or not isinstance(trouble, CONNECTION_LOST):
        log.error("redis_error", task=name, error=str(trouble))
