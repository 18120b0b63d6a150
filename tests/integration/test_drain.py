"""Drain of a worker while its runs train: no request fails, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Reason
from cotrain_store.oplog.moves import Drains
from cotrain_workers.engine.engine import Engine
from tests.support.program import LORA, PROGRAM, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.sampling import ended, submit_sample, submit_save
from tests.support.stack import POOL, Stack, worker
from tests.support.two_workers import NEW, OLD, STEP, heartbeat, is_listed
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("heartbeats_are_quick")


async def test_a_worker_is_drained_while_its_runs_train_and_returns(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, tiny_model: Path,
    redis: Any,
) -> None:  # fmt: skip
    from cotrain_workers.engine.engine import Engine as AnotherEngine

    url, drains = empty_redis.url, Drains(server.dispatch._redis)
    expected, digest = await undisturbed(server, url, tmp_path, engine)
    other = AnotherEngine.load(str(tiny_model))
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine):
        answers = await results(server, run, await submit(server, run, 1, STEP))
        with worker(url, tmp_path, other, worker_id=NEW):
            await until(lambda: heartbeat(redis, NEW))
            under_way = await submit(server, run, STEP + 1, 2 * STEP)
            await drains.ask(POOL, OLD)
            await drains.ask(POOL, OLD)
            answers += await results(server, run, under_way)
            await until(lambda: not is_listed(redis, OLD))
            after = await submit(server, run, 2 * STEP + 1, len(PROGRAM))
            answers += await results(server, run, after)
            assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()
            assert heartbeat(redis, OLD)["state"] == "drained"
            assert heartbeat(redis, OLD)["runs"] == 0
            assert run.id not in engine.adapters
            assert await drains.take_back(POOL, OLD)
            await until(lambda: is_listed(redis, OLD))
            await until(lambda: heartbeat(redis, OLD)["state"] == "serving")
    assert answers == expected
    assert other.adapters.state(run.id).digest() == digest


async def test_a_single_worker_keeps_its_runs_until_another_one_starts(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, tiny_model: Path,
    redis: Any,
) -> None:  # fmt: skip
    from cotrain_workers.engine.engine import Engine as AnotherEngine

    url, drains = empty_redis.url, Drains(server.dispatch._redis)
    other = AnotherEngine.load(str(tiny_model))
    with refused(Reason.WORKER_NOT_FOUND):
        await drains.ask(POOL, OLD)
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine):
        await results(server, run, await submit(server, run, 1, 1))
        await drains.ask(POOL, OLD)
        await until(lambda: heartbeat(redis, OLD)["state"] == "draining")
        save = await submit_save(server, run, 2)
        await server.result(run, save)
        assert not heartbeat(redis, OLD)["is_handing_over"]
        sampler = await server.records.sampler(run.tenant, "a:sample:0")
        await ended(server, sampler, await submit_sample(server, sampler, 1))
        with worker(url, tmp_path, other, worker_id=NEW):
            await until(lambda: not is_listed(redis, OLD))
            await ended(server, sampler, await submit_sample(server, sampler, 2))
            assert redis.hkeys(redis_keys.draining(POOL)) == [OLD.encode()]
        # The other worker is gone: the draining one continues, so that its pool need not wait.
        await until(lambda: is_listed(redis, OLD))
        await server.result(run, await server.optim_step(run, 3))


async def test_a_drained_worker_that_starts_again_stays_drained(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, tiny_model: Path,
    redis: Any,
) -> None:  # fmt: skip
    from cotrain_workers.engine.engine import Engine as AnotherEngine

    url = empty_redis.url
    other = AnotherEngine.load(str(tiny_model))
    with worker(url, tmp_path, other, worker_id=NEW):
        await until(lambda: heartbeat(redis, NEW))
        redis.hset(redis_keys.draining(POOL), OLD, "1.0")
        with worker(url, tmp_path, engine):
            await until(lambda: heartbeat(redis, OLD) and not is_listed(redis, OLD))
            run = await server.create("a", "a", LORA)
            await results(server, run, await submit(server, run, 1, 1))
            assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()
