"""Background tasks that continue after any error of Redis, until their process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from cotrain_store.redis_client.connection import repeat, stop_tasks


async def test_an_error_of_redis_is_logged_and_the_task_continues() -> None:
    refusals: Iterator[Exception] = iter([ResponseError("MISCONF no"), RedisConnectionError("away")])
    third = asyncio.Event()

    async def turn() -> None:
        for refusal in refusals:
            raise refusal
        third.set()

    with capture_logs() as logs:
        task = asyncio.create_task(repeat("sweep", 0.0, turn))
        await third.wait()
        await stop_tasks([task])
    assert [(entry["event"], entry["task"], entry["error"]) for entry in logs] == [
        ("redis_error", "sweep", "MISCONF no")
    ]


async def test_a_defect_of_ours_ends_the_task() -> None:
    async def turn() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await repeat("sweep", 0.0, turn)
