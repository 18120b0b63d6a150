"""The Redis of the compose file and a separate one: start, acknowledged writes, TLS, and a user for each kind of process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cotrain_store import redis_keys
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command
from cotrain_store.errors import StoreUnavailable
from cotrain_store.redis_client.connection import DURABLE, check_store, open_connection, open_sync_connection
from cotrain_store.settings import with_password_of
from cotrain_store.tenants.api_keys import Tenants
from tests.support.compose_files import ROOT
from tests.support.ports import free_port
from tests.support.processes import WORKER, Process, settings_of
from tests.support.program import LORA, results, submit
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import LONG, sample, saved_sampler
from tests.support.stack import accepting

CONFIG = ROOT / "docker" / "redis"
#: Options for its address and folder, and options that only one of the two needs.
OWN_PLACE = {
    "bind", "protected-mode", "port", "aclfile", "dir", "logfile", "unixsocket", "unixsocketperm",
}  # fmt: skip


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
    with open_sync_connection(url) as connection:
        check_store(connection, accept_data_loss=False)
        assert connection.get(redis_keys.schema()) == redis_keys.SCHEMA_VERSION.encode()


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


TLS = ROOT / "tests" / "data" / "tls"
USERS = ("cotrain-api", "cotrain-scheduler", "cotrain-worker")


@pytest.fixture
async def tls_port(empty_redis: EmbeddedRedis) -> AsyncIterator[int]:
    """Terminate TLS in front of a Redis, in place of a Redis that was built with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            behind, to_behind = await asyncio.open_unix_connection(empty_redis.socket)
            async with asyncio.TaskGroup() as both:
                both.create_task(passed_on(reader, to_behind))
                both.create_task(passed_on(behind, writer))

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(65_536):
                writer.write(part)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_redis_is_used_over_tls_with_a_valid_certificate(tls_port: int) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={TLS / 'ca.pem'}"
    of_worker = open_sync_connection(url)
    await asyncio.to_thread(check_store, of_worker, accept_data_loss=False)
    connection = open_connection(url)
    assert await connection.get(redis_keys.schema())
    await connection.aclose()
    await asyncio.to_thread(of_worker.close)


async def test_an_untrusted_certificate_is_reported(tls_port: int) -> None:
    with (
        open_sync_connection(f"rediss://127.0.0.1:{tls_port}/0") as connection,
        pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        await asyncio.to_thread(check_store, connection, accept_data_loss=False)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Start a Redis with the users of the file for operators."""
    port = free_port()
    lines = (ROOT / "docker" / "redis" / "users-by-process.acl").read_text()
    users = tmp_path / "users.acl"
    users.write_text(re.sub(r"\{password of (.+?)\}", lambda of: hashlib.sha256(of[1].encode()).hexdigest(), lines))
    (tmp_path / "redis").mkdir()
    command = redis_command(find_redis_binary(), tmp_path / "redis", tmp_path / "redis" / "s")
    command[command.index("--port") + 1] = str(port)
    with (tmp_path / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, "--aclfile", str(users)], stdout=log, stderr=log)
    retry = Retry(ConstantBackoff(0.02), 500)
    with redis.Redis.from_url(url_of("cotrain-api", port), retry=retry) as connection:
        assert connection.ping()
    yield port
    process.kill()
    process.wait()


def url_of(user: str, port: int) -> str:
    """Return the URL of a user, whose password is its name."""
    return f"redis://{user}:{user}@127.0.0.1:{port}/0"


async def test_each_kind_of_process_works_with_the_rights_of_its_user(
    port: int, tmp_path: Path, tiny_model: Path
) -> None:
    def settings(user: str) -> dict[str, str]:
        return settings_of(url_of(user, port), tmp_path, tiny_model)

    of_scheduler = {name: settings("cotrain-scheduler")[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
    with (
        Process("cotrain_scheduler", of_scheduler, tmp_path / "scheduler.log"),
        Process(WORKER, settings("cotrain-worker"), tmp_path / "worker.log") as worker,
    ):
        async with accepting(url_of("cotrain-api", port), tmp_path) as server:
            assert await Tenants(server.connection).issue("a new tenant")
            run = await server.create("a", "a", LORA)
            await results(server, run, await submit(server, run, 1, 4))
            sampler = await saved_sampler(server, run, 5)
            assert await sample(server, sampler, 0, LONG, seed=1)
        await asyncio.to_thread(worker.stop)
    log = (tmp_path / "worker.log").read_text() + (tmp_path / "scheduler.log").read_text()
    assert "NOPERM" not in log


@pytest.mark.parametrize("user", USERS)
def test_no_user_administers_redis_and_workers_read_no_keys_of_tenants(port: int, user: str) -> None:
    with redis.Redis.from_url(url_of(user, port)) as connection:
        for forbidden in ("FLUSHALL", "CONFIG SET maxmemory 1", "ACL LIST", "SHUTDOWN", "KEYS *"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                connection.execute_command(*forbidden.split())
        with pytest.raises(redis.exceptions.NoPermissionError):
            connection.get("another programs key")
        for secret in (redis_keys.api_key("x"), redis_keys.api_keys(), redis_keys.signing_secret()):
            may_read = contextlib.nullcontext() if user == "cotrain-api" else pytest.raises(
                redis.exceptions.NoPermissionError
            )  # fmt: skip
            with may_read:
                connection.exists(secret)


def test_without_a_user_redis_answers_nothing(port: int) -> None:
    with redis.Redis(port=port) as connection, pytest.raises(redis.exceptions.AuthenticationError):
        connection.ping()
