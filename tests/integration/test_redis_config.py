"""The Redis of the compose file, for real: it starts, keeps what it acknowledged, and lets us in."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cotrain_store.connection import DURABLE, check_store, open_connection
from cotrain_store.embedded import find_redis_binary, redis_command
from cotrain_store.keys import fleet_keys
from tests.support.compose_files import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = ROOT / "docker" / "redis"
#: Where it listens, where it writes, and what only one of the two needs.
OWN_PLACE = {
    "bind", "protected-mode", "port", "aclfile", "dir", "logfile", "unixsocket", "unixsocketperm",
}  # fmt: skip

QUOTES = '""'

pytestmark = pytest.mark.redis


def options() -> dict[str, str]:
    lines = (CONFIG / "redis.conf").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {name: value.strip('"') for name, value in pairs}


def embedded_options() -> dict[str, str]:
    _, *flags = redis_command(Path("redis-server"), Path("/data"), Path("/run/redis.sock"))
    return {
        name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start it from the files in docker/redis, but on a socket and a folder of its own."""
    folder = tmp_path_factory.mktemp("redis")
    address = f"unix://{folder}/s"
    place = {"port": "0", "unixsocket": f"{folder}/s", "dir": f"{folder}"}
    chosen = options() | {"aclfile": f"{CONFIG}/users.acl", "logfile": f"{folder}/log"} | place
    config = folder / "redis.conf"
    config.write_text("".join(f"{name} {value or QUOTES}\n" for name, value in chosen.items()))
    process = subprocess.Popen([find_redis_binary(), config])
    try:
        retry = Retry(ConstantBackoff(0.02), 500)
        with redis.Redis.from_url(address, retry=retry) as connection:
            connection.ping()
        yield address
    finally:
        process.kill()
        process.wait()


def test_it_is_configured_like_the_redis_we_embed() -> None:
    ours, embedded = options(), embedded_options()
    assert {n: v for n, v in ours.items() if n not in OWN_PLACE} == {
        n: v for n, v in embedded.items() if n not in OWN_PLACE
    }


def test_it_keeps_every_acknowledged_write() -> None:
    assert {name: options()[name] for name in DURABLE} == DURABLE


def test_the_store_accepts_it(url: str) -> None:
    async def check() -> bytes | None:
        connection = open_connection(url)
        await check_store(connection, accept_data_loss=False)
        version: bytes | None = await connection.get(fleet_keys.schema())
        await connection.aclose()
        return version

    assert asyncio.run(check()) == fleet_keys.SCHEMA_VERSION.encode()


def test_its_user_cannot_weaken_or_empty_it(url: str) -> None:
    with redis.Redis.from_url(url) as connection:
        for refused in (
            ["CONFIG", "SET", "appendfsync", "no"],
            ["FLUSHALL"],
            ["SHUTDOWN"],
            ["ACL", "SETUSER", "other"],
            ["KEYS", "*"],
            ["SET", "not-ours", "1"],
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                connection.execute_command(*refused)
