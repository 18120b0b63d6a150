"""A disk that is full for a while is a pause: no worker dies of it, and no number changes."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.bodies import sequences
from tests.support.program import LORA, results
from tests.support.stack import worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cotrain_workers.engine import Engine
    from tests.support.redis_server import EmbeddedRedis
    from tests.support.stack import Stack

LARGE = sequences(0, 12, 500)  # its result goes to the spool


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Return a function that lets the next so many syncs of the spool fail, and counts them."""
    sync, left, failed = os.fdatasync, [0.0], [0]

    def fdatasync(file: int) -> None:
        if left[0] > 0:
            left[0] -= 1
            failed[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr("cotrain_store.spool.os.fdatasync", fdatasync)

    def fill(times: float) -> list[int]:
        left[0] = times
        return failed

    return fill


async def test_a_result_waits_for_room(
    server: Stack,
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    disk: Callable[[float], list[int]],
) -> None:
    other, run = [await server.create(name, name, LORA) for name in ("a", "b")]
    url = empty_redis.url
    with worker(url, tmp_path, engine):
        expected = await results(server, other, [await server.forward_backward(other, 1, LARGE)])
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(3)
    with worker(url, tmp_path, engine):
        assert await results(server, run, [request]) == expected
    assert failed == [3]
    assert engine.state(run.id).grads.equal(engine.state(other.id).grads)


async def test_a_worker_that_is_stopped_meanwhile_leaves_the_step_to_the_next(
    server: Stack,
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    disk: Callable[[float], list[int]],
) -> None:
    other, run = [await server.create(name, name, LORA) for name in ("a", "b")]
    url = empty_redis.url
    with worker(url, tmp_path, engine):
        expected = await results(server, other, [await server.forward_backward(other, 1, LARGE)])
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(float("inf"))
    with worker(url, tmp_path, engine):
        while failed[0] < 2:  # noqa: ASYNC110  # another thread's doing
            await asyncio.sleep(0.01)
    disk(0)
    with worker(url, tmp_path, engine):
        assert await results(server, run, [request]) == expected
    assert engine.state(run.id).grads.equal(engine.state(other.id).grads)
