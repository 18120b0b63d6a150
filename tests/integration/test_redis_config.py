"""The Redis of the compose file: it starts, keeps acknowledged writes, and accepts our connections."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cotrain_store import redis_keys
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command
from cotrain_store.redis_client.connection import DURABLE, check_store, open_connection
from cotrain_store.settings import with_password_of
from tests.support.compose_files import ROOT

CONFIG = ROOT / "docker" / "redis"
#: Options for its address and folder, and options that only one of the two needs.
OWN_PLACE = {
    "bind", "protected-mode", "port", "aclfile", "dir", "logfile", "unixsocket", "unixsocketperm",
}  # fmt: skip

pytestmark = pytest.mark.redis


def options() -> dict[str, str]:
    lines = (CONFIG / "redis.conf").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {name: value.strip('"') for name, value in pairs}


def embedded_options() -> dict[str, str]:
    _, *flags = redis_command(Path("redis-server"), Path("/data"), Path("/run/redis.sock"))
    return {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Start it as its container does, but on a separate socket and folder."""
    address = f"unix://{folder}/s"
    process = subprocess.Popen(
        [CONFIG / "start.sh", "--port", "0", "--unixsocket", f"{folder}/s", "--logfile", f"{folder}/log"],
        env=container_environment(folder),
    )  # fmt: skip
    try:
        retry = Retry(ConstantBackoff(0.02), 500)
        with (
            redis.Redis.from_url(address, retry=retry) as connection,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            connection.ping()
        yield with_password_of(address, folder / "redis-password")
    finally:
        process.kill()
        process.wait()


def container_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which start.sh and healthy.sh write to a folder and find the
    embedded server."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    server = programs / "redis-server"
    if not server.exists():
        server.symlink_to(find_redis_binary())
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "REDIS_FOLDER": str(folder),
        "REDIS_PASSWORD_FILE": f"{folder}/redis-password",
        "TMPDIR": str(folder),
    }


def test_nothing_is_answered_without_the_password(url: str, folder: Path) -> None:
    bare = f"unix://{folder}/s"
    with redis.Redis.from_url(bare) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
        stranger.get("cotrain:schema")
    with redis.Redis.from_url(url) as ours:
        assert ours.ping()


def test_the_password_is_created_once_and_readable_only_by_its_user(url: str, folder: Path) -> None:
    file = folder / "redis-password"
    password = file.read_text()
    assert re.fullmatch("[0-9a-f]{48}", password)
    assert file.stat().st_mode & 0o077 == 0
    assert password not in (folder / "users.acl").read_text()
    again = subprocess.run(
        [CONFIG / "start.sh", "--port", "0", "--unixsocket", "/no/such/folder/s"],
        env=container_environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode != 0
    assert file.read_text() == password
    assert password not in again.stdout + again.stderr


def test_a_volume_of_another_user_is_reported_in_a_sentence(tmp_path: Path) -> None:
    told = subprocess.run(
        [CONFIG / "start.sh"],
        env=container_environment(tmp_path) | {"REDIS_FOLDER": "/proc/1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 1
    assert "/proc/1 cannot be written by user" in told.stderr


def test_an_existing_password_may_be_in_a_read_only_folder(tmp_path: Path) -> None:
    """A Secret of Kubernetes is read-only.

    Root can write to every folder, so only a run as another user can detect an error.
    """
    secret, folder = tmp_path / "secret", tmp_path / "redis"
    for each in (secret, folder):
        each.mkdir()
    (secret / "redis-password").write_text("s3cret-password\n")
    secret.chmod(0o500)
    done = subprocess.run(
        [CONFIG / "start.sh", "--port", "0", "--unixsocket", "/no/such/folder/s"],
        env=container_environment(folder) | {"REDIS_PASSWORD_FILE": f"{secret}/redis-password"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "cannot be written" not in done.stderr
    assert (secret / "redis-password").read_text() == "s3cret-password\n"
    assert hashlib.sha256(b"s3cret-password").hexdigest() in (folder / "users.acl").read_text()


def test_it_is_configured_like_the_embedded_redis() -> None:
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
        version: bytes | None = await connection.get(redis_keys.schema())
        await connection.aclose()
        return version

    assert asyncio.run(check()) == redis_keys.SCHEMA_VERSION.encode()


def test_its_user_cannot_weaken_or_flush_it(url: str) -> None:
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
