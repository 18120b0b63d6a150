"""Connections to Redis: invalid, lost, shared by callers, and shared by the tests of a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import DataError, ResponseError

from cotrain_store import redis_keys
from cotrain_store.blobs.opening import MARK, claim_blobs
from cotrain_store.errors import StoreUnavailable, UnsafeRedis
from cotrain_store.redis_client.connection import (
    CONNECTION_LOST,
    DURABLE,
    Connection,
    SyncConnection,
    check_store,
    open_batching_connection,
    open_sync_connection,
    stop_tasks,
)
from tests.support.log import Log, open_log
from tests.support.processes import ended, settings_of
from tests.support.redis_server import EmbeddedRedis

OLDER = str(int(redis_keys.SCHEMA_VERSION) - 1)
NEWER = str(int(redis_keys.SCHEMA_VERSION) + 1)
UNSAFE = {"appendonly": "no", "appendfsync": "everysec", "maxmemory-policy": "allkeys-lru"}


async def test_our_own_redis_is_accepted(log: Log) -> None:
    check_store(log.redis, accept_data_loss=False)


@pytest.mark.parametrize("setting", UNSAFE)
async def test_a_redis_that_could_lose_writes_is_rejected_unless_allowed(log: Log, setting: str) -> None:
    log.redis.config_set(setting, UNSAFE[setting])
    try:
        with pytest.raises(UnsafeRedis, match=f"{setting} is '{UNSAFE[setting]}'.*COTRAIN_ACCEPT_DATA_LOSS"):
            check_store(log.redis, accept_data_loss=False)
        check_store(log.redis, accept_data_loss=True)
    finally:
        log.redis.config_set(setting, DURABLE[setting])


@pytest.mark.parametrize("theirs", [OLDER, NEWER])
async def test_a_store_with_another_schema_is_always_rejected(log: Log, theirs: str) -> None:
    log.redis.set(redis_keys.schema(), theirs)
    with pytest.raises(UnsafeRedis, match=f"schema version {theirs}; this program reads"):
        check_store(log.redis, accept_data_loss=True)
    assert log.redis.get(redis_keys.schema()) == theirs.encode()


@pytest.mark.parametrize("theirs", [OLDER, NEWER])
@pytest.mark.parametrize("module", ["cotrain_server", "cotrain_scheduler", "cotrain_workers"])
def test_no_process_writes_to_a_store_with_another_schema(
    module: str, theirs: str, empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    """Connect an older process to the store of a newer one, and the reverse."""
    with open_sync_connection(empty_redis.url) as redis:
        redis.set(redis_keys.schema(), theirs)
        settings = settings_of(empty_redis.url, tmp_path / "data", tmp_path / "no-model")
        refused = ended(module, settings)
        said = refused.stdout + refused.stderr
        assert refused.returncode == 2, said
        assert f"schema version {theirs}" in said
        assert "Start the cotrain that wrote it." in said
        assert "Traceback" not in said
        assert redis.keys() == [redis_keys.schema().encode()]


def test_a_missing_redis_is_reported_as_unavailable(tmp_path: Path) -> None:
    with open_sync_connection(f"unix://{tmp_path}/nobody.sock") as redis, pytest.raises(StoreUnavailable):
        check_store(redis, accept_data_loss=False)


async def test_hundreds_of_calls_at_once_queue_for_a_connection(log: Log) -> None:
    assert await asyncio.gather(*(log.connection.ping() for _ in range(500))) == [True] * 500


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_worker_that_sleeps_while_redis_crashes_still_wakes(tmp_path: Path, is_connected: bool) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log:
            if is_connected:
                await asyncio.to_thread(log.execution.wait, 0.01)
            else:
                log.redis.close()
            server.kill()
            with pytest.raises(CONNECTION_LOST):
                log.execution.wait(60)
            server.restart()
            await asyncio.to_thread(log.execution.wait, 0.01)
            await heard_by_a_sleeper(log)


async def heard_by_a_sleeper(log: Log) -> None:
    """Plan an op, which ends a sleep that would otherwise outlast the test."""
    await log.dispatch.lead()
    sleeping = asyncio.create_task(asyncio.to_thread(log.execution.wait, 600))
    await log.new_run()
    await log.plan()
    await asyncio.wait_for(sleeping, 120)
    log.execution.leave()


async def test_a_claimed_folder_is_rejected_by_a_redis_that_lost_its_data(
    empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    redis, folder = open_sync_connection(empty_redis.url), tmp_path / "data"
    for _ in range(2):
        claim_blobs(redis, folder)
        claim_blobs(redis, tmp_path / "of-another-host")
    empty_redis.flush()
    with pytest.raises(UnsafeRedis, match="would delete them as unreferenced"):
        claim_blobs(redis, folder)
    assert [path.name for path in folder.iterdir()] == [MARK]
    (folder / MARK).unlink()
    claim_blobs(redis, folder)


def test_a_worker_that_would_delete_files_of_another_redis_does_not_start(
    empty_redis: EmbeddedRedis, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / MARK).write_text("another")
    process = ended("cotrain_workers", settings_of(empty_redis.url, tmp_path, tiny_model))
    assert process.returncode == 2
    assert "belong to another Redis" in process.stdout + process.stderr


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        await stop_tasks([task])
    assert task.cancelled()


@pytest.fixture
async def shared(empty_redis: EmbeddedRedis) -> AsyncIterator[Connection]:
    connection = open_batching_connection(empty_redis.url)
    yield connection
    await connection.aclose()


async def test_callers_at_the_same_time_share_a_few_round_trips(shared: Connection, redis: SyncConnection) -> None:
    await shared.ping()
    before = _reads(redis)
    numbers = await asyncio.gather(*(shared.incr("n") for _ in range(300)))
    assert sorted(numbers) == list(range(1, 301))
    assert _reads(redis) - before < 20


async def test_what_redis_refuses_or_cannot_be_sent_fails_alone(shared: Connection) -> None:
    await shared.set("text", "x")
    asked: list[Any] = [shared.incr("text"), shared.set("n", None), shared.set("n", "\ud800")]
    asked += [shared.incr("n") for _ in range(3)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    errors = [type(answer) for answer in answers[:3]]
    assert errors == [ResponseError, DataError, UnicodeEncodeError]
    assert answers[3:] == [1, 2, 3]


async def test_a_caller_that_gives_up_takes_nobody_along(shared: Connection) -> None:
    calls = [shared.incr("n") for _ in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [int, asyncio.CancelledError, int]


async def test_a_script_is_sent_again_to_a_redis_that_was_started_again() -> None:
    with EmbeddedRedis() as server:
        shared = open_batching_connection(server.url)
        script = shared.register_script("return ARGV[1]")
        assert await script([], ["one"]) == b"one"
        server.kill()
        server.restart()
        assert [*await asyncio.gather(script([], ["two"]), script([], ["three"]))] == [b"two", b"three"]
        await shared.aclose()


async def test_a_redis_that_is_gone_is_told_to_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.redis_client.connection._RETRIES", 0)
    with EmbeddedRedis() as server:
        shared = open_batching_connection(server.url)
        await shared.ping()
        server.kill()
        answers = await asyncio.gather(*(shared.ping() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(answer, CONNECTION_LOST) for answer in answers)
        assert len({id(answer) for answer in answers}) == 3
        await shared.aclose()


def _reads(redis: SyncConnection) -> int:
    reads: int = redis.info("stats")["total_reads_processed"]
    return reads
