"""Transient errors of Redis: read-only, a failing disk, a script that does not end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisError

from cotrain_workers.engine.engine import Engine
from tests.support.http_api import pass_body, running_api
from tests.support.program import LORA, PROGRAM, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import snapshots, stack, worker

Refusing = Callable[[str], AbstractContextManager[None]]


@contextlib.contextmanager
def read_only(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection:
        connection.replicaof("127.0.0.1", "1")
        try:
            yield
        finally:
            connection.replicaof("NO", "ONE")


@contextlib.contextmanager
def with_a_failing_disk(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection:
        connection.config_set("save", "3600 1")
        connection.config_set("rdbcompression", "no")
        folder = connection.config_get("dir")["dir"]
        file = f"{folder}/{connection.config_get('dbfilename')['dbfilename']}"
        with as_a_folder(file):
            connection.bgsave()
            while connection.info("persistence")["rdb_last_bgsave_status"] == "ok":
                time.sleep(0.01)
        try:
            yield
        finally:
            connection.config_set("save", "")


@contextlib.contextmanager
def as_a_folder(file: str) -> Iterator[None]:
    """Replace a file that Redis writes by a folder, so that writing fails."""
    from pathlib import Path

    path = Path(file)
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "full").touch()
    try:
        yield
    finally:
        (path / "full").unlink()
        path.rmdir()


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection, redis.Redis.from_url(url) as other:
        connection.config_set("lua-time-limit", 1)

        def loop() -> None:
            with contextlib.suppress(RedisError):  # it is killed
                other.eval("while true do end", 0)

        script = threading.Thread(target=loop)
        script.start()
        try:
            while True:
                try:
                    connection.ping()
                except RedisError:
                    break
            yield
        finally:
            connection.script_kill()
            script.join()


REFUSING = {"READONLY": read_only, "MISCONF": with_a_failing_disk, "BUSY": busy}
REASONS = {
    "READONLY": "Redis is a replica, and takes no writes.",
    "MISCONF": "Redis could not write its last snapshot, and takes no writes (MISCONF).",
    "BUSY": "Redis takes nothing for now: ",
}


@pytest.fixture(scope="module")
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.mark.parametrize("code", REFUSING)
async def test_a_request_is_answered_503_and_taken_afterwards(own_redis: EmbeddedRedis, code: str) -> None:
    own_redis.flush()
    async with running_api(own_redis.url) as api:
        run = await api.new_run()
        with REFUSING[code](own_redis.url):
            refused = await api.post("forward_backward", pass_body(run, 1))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["code"] == "store_unavailable"
            session = await api.post("create_session", {})
            assert (session.status_code, session.headers["retry-after"]) == (503, "1")
            reasons = (await api.http.get("/readyz")).json()["reasons"]
            assert any(reason.startswith(REASONS[code]) for reason in reasons), reasons
        taken = await api.post("forward_backward", pass_body(run, 1))
        assert taken.json()["request_id"] == f"{run}:1"


async def test_training_continues_with_the_same_numbers_after_each_error(
    own_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    own_redis.flush()
    url = own_redis.url
    async with stack(url, tmp_path) as server:
        expected, digest = await undisturbed(server, url, tmp_path, engine)
        run = await server.create("a", "a", LORA)
        with worker(url, tmp_path, engine, tuning=snapshots(ops=3)):
            answers = []
            for seq in range(1, len(PROGRAM) + 1):
                (request,) = await submit(server, run, seq, seq)
                if seq % 4 == 1 and seq // 4 < len(REFUSING):
                    with [*REFUSING.values()][seq // 4](url):
                        await asyncio.sleep(0.3)
                answers += await results(server, run, [request])
        assert answers == expected
        assert engine.adapters.state(run.id).digest() == digest
