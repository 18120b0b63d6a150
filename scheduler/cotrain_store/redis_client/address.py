"""Parser of `COTRAIN_REDIS_URL`, and connection pools for Redis Sentinel. The parser is pure.

    unix:///path/redis.sock
    redis://user:password@host:6379/0
    rediss://user:password@host:6379/0?ssl_ca_certs=/path/ca.pem
    redis+sentinel://user:password@host:26379,host:26379/service/0
    rediss+sentinel://…

Options after `?` are those of redis-py, with two exceptions. The option `replicas=1` is the number of replicas that
must have each write on disk (`clients.py`). Options that begin with `sentinel_` are for the Sentinels instead of Redis.
TLS options apply to both.

The pools connect to the master that the Sentinels report, and follow it when it changes.
"""

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
    """A parsed address."""

    url: str = field(repr=False)  # URL for redis-py; empty with Sentinels
    replicas: int = 0  # number of replicas that must have each write on disk
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""  # name of the master and its replicas in the Sentinels
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of a connection to a Redis reported by Sentinels."""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of a connection to a Sentinel."""


def parse_address(url: str) -> RedisAddress:
    """Return the address in a URL. Raises ValueError: the URL is invalid. The message names the part, and never
    contains the password.
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
        raise ValueError("redis_url names no Sentinels and service: redis+sentinel://host:26379,host:26379/service/0")
    of_sentinel: dict[str, Any] = {
        name.removeprefix(_OF_SENTINEL): options.pop(name) for name in list(options) if name.startswith(_OF_SENTINEL)
    }
    of_redis: dict[str, Any] = {**options, **_login(login), "db": _number(database or "0", "database")}
    if scheme == "rediss+sentinel":
        of_redis["ssl"] = True
        of_sentinel |= {name: value for name, value in of_redis.items() if name.startswith("ssl")}
    sentinels = tuple(_host(each) for each in hosts.split(","))
    return RedisAddress("", replicas, sentinels, service, of_redis, of_sentinel)


def with_password(url: str, password: str) -> str:
    """Return the URL with a password; it may already have a user. Raises ValueError: it already has a password."""
    scheme, _, rest = url.partition("://")
    # Without `urlunsplit`, which drops the empty host of `unix:///path`. The part after `/` may contain an @, too.
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


class BlockingSentinelPool(redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Pool of asynchronous connections. Callers queue for one, as in any blocking pool."""

    @override
    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close connections. If those in use are included, close those to the Sentinels as well."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


class BlockingSyncSentinelPool(redis.sentinel.SentinelConnectionPool, redis.BlockingConnectionPool):
    """Pool of synchronous connections."""


def sentinel_pool(address: RedisAddress, settings: Mapping[str, Any]) -> Any:
    """Return a pool of asynchronous connections. It connects on first use."""
    once = AsyncRetry(NoBackoff(), 0)
    return _made(redis.asyncio.sentinel.Sentinel, BlockingSentinelPool, address, settings, once)


def sync_sentinel_pool(address: RedisAddress, settings: Mapping[str, Any]) -> Any:
    """Return a pool of synchronous connections. It connects on first use."""
    once = Retry(NoBackoff(), 0)
    return _made(redis.sentinel.Sentinel, BlockingSyncSentinelPool, address, settings, once)


def _made(watchers: Any, pool: Any, address: RedisAddress, settings: Mapping[str, Any], once: Any) -> Any:
    # Each Sentinel gets one attempt with the connect timeout of Redis. Then the next one is tried.
    wait_s = settings["socket_connect_timeout"]
    waits = {"socket_timeout": wait_s, "socket_connect_timeout": wait_s, "retry": once}
    found = watchers(address.sentinels, sentinel_kwargs={**waits, **address.sentinel_options})
    return pool(address.service, found, **{**settings, **address.options})
