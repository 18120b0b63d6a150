"""Where Redis is, as `COTRAIN_REDIS_URL` says it. Pure.

    unix:///path/redis.sock
    redis://user:password@host:6379/0                              rediss://…?ssl_ca_certs=/path/ca.pem
    redis+sentinel://user:password@host:26379,host:26379/service/0  rediss+sentinel://…

Options behind `?` are redis-py's, but for two of ours: `replicas=1` says on the disks of how many replicas a write has
to be (`replicas.py`), and what begins with `sentinel_` is for the Sentinels instead of Redis. TLS is for both.

Pools of connections to the master that Sentinels name; they follow when it is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

SCHEMES = ("unix", "redis", "rediss")
OF_SENTINELS = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26_379
MAX_REPLICAS = 8
_OF_SENTINEL = "sentinel_"


@dataclass(frozen=True)
class RedisAddress:
    """An address that was read."""

    url: str = field(repr=False)
    """For redis-py; without Sentinels."""
    replicas: int = 0
    """On the disks of so many replicas a write has to be."""
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    """What the Sentinels call the master and its replicas."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of a connection to Redis that Sentinels name."""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of a connection to a Sentinel."""


def parse_address(url: str) -> RedisAddress:
    """Read a URL.

    Raises:
        ValueError: it is none of ours; in a sentence that names the part, and never the password.
    """
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    replicas = _number(options.pop("replicas", "0"), "replicas", MAX_REPLICAS)
    if scheme in SCHEMES:
        left = f"?{urlencode(options)}" if options else ""
        return RedisAddress(f"{scheme}://{where}{left}", replicas)
    if scheme not in OF_SENTINELS:
        known = ", ".join(f"{each}://" for each in (*SCHEMES, *OF_SENTINELS))
        raise ValueError(f"redis_url begins with none of {known}")
    login, _, hosts = where.partition("/")[0].rpartition("@")
    service, _, database = where.partition("/")[2].strip("/").partition("/")
    if not hosts or not service:
        raise ValueError(
            "redis_url names no Sentinels and service: redis+sentinel://host:26379,host:26379/service/0"
        )
    of_sentinel: dict[str, Any] = {
        name.removeprefix(_OF_SENTINEL): options.pop(name)
        for name in list(options)
        if name.startswith(_OF_SENTINEL)
    }
    of_redis: dict[str, Any] = {
        **options,
        **_login(login),
        "db": _number(database or "0", "database"),
    }
    if scheme == "rediss+sentinel":
        of_redis["ssl"] = True
        of_sentinel |= {name: value for name, value in of_redis.items() if name.startswith("ssl")}
    sentinels = tuple(_host(each) for each in hosts.split(","))
    return RedisAddress("", replicas, sentinels, service, of_redis, of_sentinel)


def with_password(url: str, password: str) -> str:
    """Put a password into a URL that may name a user.

    Raises:
        ValueError: it names a password of its own.
    """
    scheme, _, rest = url.partition("://")
    # By hand: `urlunsplit` drops the empty host of `unix:///path`. What stands behind `/` may hold an @ as well.
    login, at, _ = urlsplit(url).netloc.rpartition("@")
    behind = rest.removeprefix(login + at)
    if ":" in login:
        raise ValueError("redis_url names a password, and redis_password_file another: set one.")
    return f"{scheme}://{login}:{quote(password, safe='')}@{behind}"


def _login(given: str) -> dict[str, str]:
    user, _, password = given.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in named.items() if value}


def _host(given: str) -> tuple[str, int]:
    host, _, port = given.partition(":")
    return host, _number(port or str(SENTINEL_PORT), "port", 2**16 - 1)


def _number(given: str, what: str, most: int = 2**31) -> int:
    if not given.isdecimal() or int(given) > most:
        raise ValueError(f"redis_url: {what} {given!r} is no number up to {most}")
    return int(given)


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
