"""Callers that share their way to Redis: fewer round trips, and nobody's failure is another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import DataError, ResponseError

from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection, SyncConnection, open_batching_connection
from tests.support.redis_server import EmbeddedRedis


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
