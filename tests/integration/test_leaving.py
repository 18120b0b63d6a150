"""A worker's process is stopped while its runs train: they go on elsewhere at once, and nothing is replayed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_workers.engine.engine import Engine
from tests.support.program import LORA, PROGRAM, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, worker
from tests.support.two_workers import NEW, OLD, STEP, heartbeat, is_listed
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("heartbeats_are_quick")


async def test_its_runs_go_on_elsewhere_at_once_and_nothing_is_replayed(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, other: Engine,
    redis: Any,
) -> None:  # fmt: skip
    url = empty_redis.url
    expected, digest = await undisturbed(server, url, tmp_path, engine)
    run = await server.create("a", "a", LORA)
    with ExitStack() as old, worker(url, tmp_path, other, worker_id=NEW):
        redis.hset(redis_keys.draining(POOL), NEW, "1.0")  # else the run might begin there
        old.enter_context(worker(url, tmp_path, engine))
        await until(lambda: not is_listed(redis, NEW))
        answers = await results(server, run, await submit(server, run, 1, STEP))
        assert redis.hget(redis_keys.log(POOL, run.id), "worker") == OLD.encode()
        redis.hdel(redis_keys.draining(POOL), NEW)
        await until(lambda: heartbeat(redis, NEW)["state"] == "serving" and is_listed(redis, NEW))
        under_way = await submit(server, run, STEP + 1, 2 * STEP)
        await asyncio.to_thread(old.close)
        assert not is_listed(redis, OLD)
        assert not heartbeat(redis, OLD)
        answers += await results(server, run, under_way)
        after = await submit(server, run, 2 * STEP + 1, len(PROGRAM))
        answers += await results(server, run, after)
        assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()
        assert heartbeat(redis, NEW)["restored_ops"] == 0
    assert answers == expected
    assert other.adapters.state(run.id).digest() == digest
    assert redis.hget(redis_keys.counters(POOL), "reassignments") is None


async def test_alone_it_says_that_it_drains_and_keeps_its_runs_for_its_next_process(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    url, seen = empty_redis.url, []
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine) as loop:
        await results(server, run, await submit(server, run, 1, STEP))
        drain = loop._runs.copies.drain

        def look_and_drain(deadline_s: float) -> None:
            seen.append(heartbeat(redis, OLD))
            drain(deadline_s)

        loop._runs.copies.drain = look_and_drain  # type: ignore[method-assign]  # the real one, watched
    (last,) = seen
    assert (last["state"], last["is_handing_over"]) == ("draining", True)
    assert is_listed(redis, OLD)
    waiting = await submit(server, run, STEP + 1, 2 * STEP)
    with worker(url, tmp_path, engine):
        await results(server, run, waiting)
        await until(lambda: heartbeat(redis, OLD)["state"] == "serving")
        assert heartbeat(redis, OLD)["restored_ops"] == 0


async def test_workers_that_all_leave_find_their_runs_again(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, other: Engine,
    redis: Any,
) -> None:  # fmt: skip
    url = empty_redis.url
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine), worker(url, tmp_path, other, worker_id=NEW):
        await results(server, run, await submit(server, run, 1, STEP))
    waiting = await submit(server, run, STEP + 1, 2 * STEP)
    with worker(url, tmp_path, engine), worker(url, tmp_path, other, worker_id=NEW):
        await results(server, run, waiting)
        await until(lambda: heartbeat(redis, OLD) and heartbeat(redis, NEW))
        assert heartbeat(redis, OLD)["restored_ops"] + heartbeat(redis, NEW)["restored_ops"] == 0
