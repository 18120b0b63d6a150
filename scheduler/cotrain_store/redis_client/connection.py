"""Connections to Redis, the check of its durability settings, subscriptions, and the store's clock."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Self, TypeAlias

import redis
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from cotrain_store import redis_keys
from cotrain_store.errors import StoreUnavailable, UnsafeRedis
from cotrain_store.redis_client.address import RedisAddress, parse_address, sentinel_pool, sync_sentinel_pool
from cotrain_store.redis_client.clients import (
    NEEDS_OPERATOR,
    REFUSALS,
    BatchingRedis,
    ReplicatedBatchingRedis,
    ReplicatedRedis,
    ReplicatedSyncRedis,
    name_refusals,
)

log = structlog.get_logger()

_UNANSWERED = (RedisConnectionError, RedisTimeoutError)
#: Transient errors, which callers retry: Redis is unavailable or rejects writes (full, read-only, busy …).
CONNECTION_LOST = (*_UNANSWERED, *REFUSALS)
#: Any error of Redis. Only for tasks that run until their process ends; they log the error and continue.
ANY_REDIS_ERROR = (RedisError,)
#: Required settings of Redis, so that an acknowledged write survives a kill and a power cut.
DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
#: Maximum number of connections, for which callers queue. redis-py's default pool is unbounded, and fails under
#: thousands of concurrent requests.
MAX_CONNECTIONS = 64
POOL_TIMEOUT_S = 20.0
SOCKET_TIMEOUT_S = 10.0
#: redis-py types every reply as `bytes | str | …`; ours are always bytes. Its types stop here.
Connection: TypeAlias = Any
SyncConnection: TypeAlias = Any
# Every script is idempotent, so a call with an unknown outcome is repeated.
_RETRIES = 3
_SETTINGS: Mapping[str, Any] = {
    "timeout": POOL_TIMEOUT_S, "socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": 2.0,
    "health_check_interval": 15, "retry_on_error": [*_UNANSWERED],
    # Otherwise every connection reads the version of redis-py from disk.
    "driver_info": DriverInfo(),
}  # fmt: skip
#: Interval between two cancellations of a task that continues after one.
RECANCEL_S = 0.05


def open_connection(url: str) -> Connection:
    """Return a pooled asynchronous connection (scheduler). It connects on first use. Raises ValueError: the URL is not
    an address of a Redis (`address.py`).
    """
    return _open(url, redis.asyncio.Redis, ReplicatedRedis)


def open_batching_connection(url: str) -> Connection:
    """Return a connection like `open_connection`, for a process with many concurrent callers (server)."""
    return _open(url, BatchingRedis, ReplicatedBatchingRedis)


def open_sync_connection(url: str) -> SyncConnection:
    """Return a pooled synchronous connection (worker), otherwise like `open_connection`."""
    name_refusals()
    address = parse_address(url)
    settings = {**_SETTINGS, "max_connections": 8, "retry": Retry(_backoff(), _RETRIES)}
    pool = (
        sync_sentinel_pool(address, settings)
        if address.sentinels
        else redis.BlockingConnectionPool.from_url(address.url, **settings)
    )
    return _connected(address, pool, ReplicatedSyncRedis if address.replicas else redis.Redis)


def _open(url: str, plain: type[redis.asyncio.Redis], replicated: type[redis.asyncio.Redis]) -> Connection:
    address = parse_address(url)
    return _connected(address, _pool(address), replicated if address.replicas else plain)


def _connected(address: RedisAddress, pool: Any, client: Any) -> Any:
    connection = client.from_pool(pool)
    if address.replicas:
        connection.replicas = address.replicas
    return connection


def _pool(address: RedisAddress) -> redis.asyncio.BlockingConnectionPool:
    name_refusals()
    settings = {**_SETTINGS, "max_connections": MAX_CONNECTIONS, "retry": AsyncRetry(_backoff(), _RETRIES)}
    if address.sentinels:
        pool: redis.asyncio.BlockingConnectionPool = sentinel_pool(address, settings)
        return pool
    return redis.asyncio.BlockingConnectionPool.from_url(address.url, **settings)


def _backoff() -> ExponentialBackoff:
    return ExponentialBackoff(cap=0.5, base=0.02)


async def stop_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks that use Redis, and return when they have ended.

    One cancellation may not suffice. Up to Python 3.11 `asyncio.wait_for`, which redis-py calls for every
    command, ignores a cancellation at the moment the command ends (python/cpython#86296).
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=RECANCEL_S)
        await asyncio.gather(*ended, return_exceptions=True)


def check_store(connection: SyncConnection, *, accept_data_loss: bool) -> None:
    """Raise an error for a Redis that could lose acknowledged writes, or has another schema version.

    Raises:
        UnsafeRedis: a persistence setting does not guarantee durability, or the schema version differs.
        StoreUnavailable: Redis does not answer.
    """
    pipeline = connection.pipeline(transaction=False)
    for name in DURABLE:
        pipeline.config_get(name)
    pipeline.execute_command("COMMAND INFO", "WAITAOF")
    pipeline.set(redis_keys.schema(), redis_keys.SCHEMA_VERSION, nx=True)
    pipeline.get(redis_keys.schema())
    try:
        *settings, (waits,), _, version = pipeline.execute()
    except CONNECTION_LOST as lost:
        raise StoreUnavailable(f"Redis does not answer: {lost}") from lost
    if isinstance(connection, ReplicatedSyncRedis) and not waits:
        raise UnsafeRedis(
            "This Redis cannot wait for its replicas' disks (WAITAOF), as replicas= in COTRAIN_REDIS_URL asks: "
            "that takes Redis 7.2 or Valkey."
        )
    found = {name: setting.get(name) for name, setting in zip(DURABLE, settings, strict=True)}
    wrong = [
        f"{name} is {found[name]!r}, needs {needed!r}" for name, needed in DURABLE.items() if found[name] != needed
    ]
    if wrong and not accept_data_loss:
        raise UnsafeRedis(
            f"This Redis could lose acknowledged writes: {'; '.join(wrong)}. Set them, or accept the "
            "loss with COTRAIN_ACCEPT_DATA_LOSS=true."
        )
    ours, theirs = redis_keys.SCHEMA_VERSION, version.decode() if version else "none"
    if theirs != ours:
        raise UnsafeRedis(
            f"This Redis holds a store of schema version {theirs}; this program reads and writes "
            f"version {ours} alone, and leaves it as it is. Start the cotrain that wrote it."
        )


async def replies(connection: Connection, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the replies to commands in one round trip. They are no transaction."""
    pipeline = connection.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    found: list[Any] = await pipeline.execute()
    return found


async def clock_ms(connection: Connection) -> int:
    """Return the store's clock in ms. Before the first scheduler it is the host's clock.

    It starts at a time of day, and the leading scheduler advances it. Unlike the clocks of the host and of Redis, it
    never jumps, and it stops while no scheduler runs.
    """
    return parse_ms(await connection.get(redis_keys.clock()))


def parse_ms(value: bytes | None) -> int:
    """Return the ms in a value of `redis_keys.clock`; the host's time if it is missing."""
    return int(time.time() * 1000) if value is None else int(value)


#: Wait in s before a retry while Redis is unavailable.
RETRY_S = 0.2


class ChannelSubscriber:
    """Subscriber that calls `receive` with each message of a channel, and with None after each subscription.

    The subscription is renewed after Redis was unavailable. Messages are lost while it is down, so `receive` must
    reload everything for None. `others` are tasks that run during the same time.
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
        except ANY_REDIS_ERROR as error:
            log_redis_error(f"listen {channel}", error)
            await asyncio.sleep(RETRY_S)


async def repeat(name: str, every_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Call `act` every `every_s` seconds until cancelled. An error of Redis ends only one call."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await act()
        except ANY_REDIS_ERROR as error:
            log_redis_error(name, error)


def log_redis_error(name: str, error: Exception) -> None:
    """Log an error of Redis. Transient unavailability or full memory is not logged here, but by others."""
    if isinstance(error, NEEDS_OPERATOR) or not isinstance(error, CONNECTION_LOST):
        log.error("redis_error", task=name, error=str(error))
