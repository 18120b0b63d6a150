"""Pools of connections to the master that Sentinels name; they follow when it is another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.redis_client.address import RedisAddress


class BlockingSentinelPool(
    redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool
):
    """Of asynchronous connections: callers queue for one, as in any blocking pool."""

    @override
    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close connections; with those in use, which is the end, those to the Sentinels as well."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


class BlockingSyncSentinelPool(redis.sentinel.SentinelConnectionPool, redis.BlockingConnectionPool):
    """Of synchronous ones."""


def sentinel_pool(address: RedisAddress, settings: Mapping[str, Any]) -> Any:
    """Make a pool of asynchronous connections. Connects on first use."""
    once = AsyncRetry(NoBackoff(), 0)
    return _made(redis.asyncio.sentinel.Sentinel, BlockingSentinelPool, address, settings, once)


def sync_sentinel_pool(address: RedisAddress, settings: Mapping[str, Any]) -> Any:
    """Make a pool of synchronous connections. Connects on first use."""
    once = Retry(NoBackoff(), 0)
    return _made(redis.sentinel.Sentinel, BlockingSyncSentinelPool, address, settings, once)


def _made(
    watchers: Any, pool: Any, address: RedisAddress, settings: Mapping[str, Any], once: Any
) -> Any:
    # A Sentinel is asked once, and has no longer than Redis to take a connection: the next one is asked then.
    wait_s = settings["socket_connect_timeout"]
    waits = {"socket_timeout": wait_s, "socket_connect_timeout": wait_s, "retry": once}
    found = watchers(address.sentinels, sentinel_kwargs={**waits, **address.sentinel_options})
    return pool(address.service, found, **{**settings, **address.options})
