"""A temporarily full disk only delays: no worker crashes, and no number changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotrain_store.messages.runs import RunRecord
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.program import LORA, results
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Stack, worker
from tests.support.waiting import until

LARGE = sequences(0, 12, 500)  # its result goes to the spool


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Return a function that makes the next `times` syncs of the spool fail, and counts them."""
    sync, left, failed = os.fdatasync, [0.0], [0]

    def fdatasync(file: int) -> None:
        if left[0] > 0:
            left[0] -= 1
            failed[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr("cotrain_store.disk.spool.os.fdatasync", fdatasync)

    def fill(times: float) -> list[int]:
        left[0] = times
        return failed

    return fill


async def trained(server: Stack, url: str, folder: Path, engine: Engine) -> tuple[RunRecord, Any]:
    """Make a run and its first gradient while there is free space.

    Return the run and the answer.
    """
    run = await server.create("a", "a", LORA)
    with worker(url, folder, engine):
        return run, await results(server, run, [await server.forward_backward(run, 1, LARGE)])


async def test_a_result_waits_for_free_space(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, disk: Callable[[float], list[int]]
) -> None:
    url = empty_redis.url
    other, expected = await trained(server, url, tmp_path, engine)
    run = await server.create("b", "b", LORA)
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(3)
    with worker(url, tmp_path, engine):
        assert await results(server, run, [request]) == expected
    assert failed == [3]
    assert engine.adapters.state(run.id).grads.equal(engine.adapters.state(other.id).grads)


async def test_a_worker_stopped_on_a_full_disk_leaves_the_step_to_the_next(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, disk: Callable[[float], list[int]]
) -> None:
    url = empty_redis.url
    other, expected = await trained(server, url, tmp_path, engine)
    run = await server.create("b", "b", LORA)
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(float("inf"))
    with worker(url, tmp_path, engine):
        await until(lambda: failed[0] >= 2)
    disk(0)
    with worker(url, tmp_path, engine):
        assert await results(server, run, [request]) == expected
    assert engine.adapters.state(run.id).grads.equal(engine.adapters.state(other.id).grads)
