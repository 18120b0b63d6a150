"""Access to a separate Redis over the network: with TLS, and a user for each kind of process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.errors import StoreUnavailable
from cotrain_store.redis_client.connection import check_store, open_connection, open_sync_connection
from cotrain_store.results.futures import Futures
from cotrain_store.tenants.api_keys import Tenants
from tests.support.compose_files import ROOT
from tests.support.ports import free_port
from tests.support.processes import WORKER, Process, settings_of, stack_of
from tests.support.program import LORA, results, submit
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import LONG, sample, saved_sampler

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
    connection = open_connection(url)
    await check_store(connection, accept_data_loss=False)
    await connection.aclose()
    of_worker = open_sync_connection(url)
    assert await asyncio.to_thread(of_worker.get, redis_keys.schema())
    await asyncio.to_thread(of_worker.close)


async def test_an_untrusted_certificate_is_reported(tls_port: int) -> None:
    connection = open_connection(f"rediss://127.0.0.1:{tls_port}/0")
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await check_store(connection, accept_data_loss=False)
    await connection.aclose()


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
    connection = open_connection(url_of("cotrain-api", port))
    spool = Spool(tmp_path / "spool", new_writer("api"))
    with (
        Process("cotrain_scheduler", of_scheduler, tmp_path / "scheduler.log"),
        Process(WORKER, settings("cotrain-worker"), tmp_path / "worker.log") as worker,
    ):
        async with Futures(connection, spool) as futures:
            server = stack_of(connection, spool, futures)
            assert await Tenants(connection).issue("a new tenant")
            run = await server.create("a", "a", LORA)
            await results(server, run, await submit(server, run, 1, 4))
            sampler = await saved_sampler(server, run, 5)
            assert await sample(server, sampler, 0, LONG, seed=1)
        await asyncio.to_thread(worker.stop)
    log = (tmp_path / "worker.log").read_text() + (tmp_path / "scheduler.log").read_text()
    assert "NOPERM" not in log
    spool.close()
    await connection.aclose()


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
