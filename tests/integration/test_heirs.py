"""Permanent loss of a worker: another worker of its pool takes over its runs and pending saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import WorkerId
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_workers.engine.engine import Engine
from tests.support.checkpoints import checkpoint_of, run_from, submit_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import ended, submit_sample, submit_save
from tests.support.stack import POOL, Stack, snapshots, worker
from tests.support.waiting import until

STEP = 4
DEAD, HEIR = WorkerId("w0"), WorkerId("w1")


async def inherit(server: Stack, redis: Any) -> None:
    """Reassign the runs of the dead worker to the other one, without waiting for the timeout."""
    redis.delete(redis_keys.worker(POOL, DEAD))
    await until(lambda: redis.exists(redis_keys.worker(POOL, HEIR)))
    (place,) = [place for place in (await server.dispatch.view(POOL)).slots if place.worker == DEAD]
    assert await server.dispatch.reassign(POOL, place, HEIR)


async def owner(redis: Any, run: RunRecord) -> bytes:
    found: bytes = redis.hget(redis_keys.log(POOL, run.id), "worker")
    return found


@pytest.mark.parametrize(
    "failpoint",
    [
        variant(Failpoint("bodies")),
        Failpoint("commit", 1),
        Failpoint("commit", 1, after=True),
        variant(Failpoint("commit", 2)),
        variant(Failpoint("stored", of_weights=True)),
    ],
    ids=str,
)
async def test_a_successor_continues_with_the_same_numbers_and_saves(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any, failpoint: Failpoint
) -> None:
    url = empty_redis.url
    expected, digest = await undisturbed(server, url, tmp_path, engine, last=2 * STEP)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, STEP)
    save = await submit_state(server, run, STEP + 1)
    requests += await submit(server, run, STEP + 1, 2 * STEP, place=STEP + 2)
    async with dying_worker(url, tmp_path, engine, failpoint, tuning=snapshots(ops=2)):
        pass
    engine.adapters.drop(run.id)
    with worker(url, tmp_path, engine, worker_id=HEIR):
        await inherit(server, redis)
        assert await results(server, run, requests) == expected
        checkpoint = await checkpoint_of(server, run, save)
        assert await owner(redis, run) == HEIR.encode()
        twin = await run_from(server, "a", "twin", checkpoint)
        await results(server, twin, await submit(server, twin, STEP + 1, 2 * STEP, place=1))
    assert engine.adapters.state(run.id).digest() == digest
    assert engine.adapters.state(twin.id).weights.equal(engine.adapters.state(run.id).weights)


async def test_a_successor_samples_from_weights_that_it_must_still_restore(
    server: Stack,
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    redis: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request may reach the successor first; the weights are made again for it."""
    url = empty_redis.url
    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RELOAD_S", 3600.0)
    run = await server.create("a", "a", LORA)
    await submit(server, run, 1, STEP)
    save = await submit_save(server, run, STEP + 1)
    async with dying_worker(url, tmp_path, engine, Failpoint("stored", of_weights=True)):
        await server.result(run, save)
    sampler = await server.records.sampler(run.tenant, "a:sample:0")
    request = await submit_sample(server, sampler, 1)
    engine.adapters.drop(run.id)
    with worker(url, tmp_path, engine, worker_id=HEIR) as loop:
        await until(lambda: loop._weights._reload_at)
        await inherit(server, redis)
        assert (await ended(server, sampler, request)).kind is ResultKind.SAMPLE


async def test_a_worker_that_was_given_up_can_write_nothing(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    url = empty_redis.url
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 1)
    async with dying_worker(url, tmp_path, engine, Failpoint("bodies")) as zombie:
        pass
    engine.adapters.drop(run.id)
    (step,) = zombie._execution.open_steps()
    with worker(url, tmp_path, engine, worker_id=HEIR):
        await inherit(server, redis)
        await results(server, run, requests)
    late = {(op.run, op.seq): Result.failed("late", "server") for op in step.ops}
    with pytest.raises(Fenced):
        zombie._execution.commit(step, late, {}, {})
    with pytest.raises(Fenced):
        zombie._execution.heartbeat(zombie._heartbeat._describe())


async def test_a_run_that_ran_elsewhere_is_not_continued_from_stale_memory(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    """The test moves the run without the worker.

    In practice, a run returns when the other worker crashes.
    """
    url = empty_redis.url
    expected, digest = await undisturbed(server, url, tmp_path, engine, last=2 * STEP)
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine, worker_id=HEIR) as loop:
        answers = await results(server, run, await submit(server, run, 1, STEP))
        await until(lambda: loop._runs.copies.backlogs[run.id].seq == STEP)  # after the results
        stale, debt = engine.adapters.state(run.id), loop._runs.copies.backlogs[run.id]
        debt_before = type(debt)(debt.seq, used_at=debt.used_at)
        requests = await submit(server, run, STEP + 1, 2 * STEP - 1)
        answers += await results(server, run, requests)
        await until(lambda: loop._runs.copies.backlogs[run.id].seq == 2 * STEP - 1)
        engine.adapters.restore(run.id, stale)
        loop._runs.copies.backlogs[run.id] = debt_before
        answers += await results(server, run, await submit(server, run, 2 * STEP, 2 * STEP))
    assert answers == expected
    assert restored_digest(url, tmp_path, engine, run.id) == digest
