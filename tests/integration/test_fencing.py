"""Whoever was replaced can write nothing, whatever it still believes."""

from __future__ import annotations

import time

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.messages.ops import Step
from cotrain_store.oplog.dispatch import Dispatch
from tests.support.log import WORKER, Log
from tests.support.stack import POOL


async def test_a_replaced_worker_can_write_nothing(log: Log) -> None:
    run = await log.new_run()
    log.commit(await log.plan())
    await log.submit(run, 1)
    step = await log.plan()
    old = log.execution
    log.new_worker()
    before = log.everything()
    beat = WorkerHeartbeat(WORKER, old.epoch, "serving", "cpu", 1.0, 0, 0, time.time())

    with pytest.raises(Fenced):
        log.commit(step)
    with pytest.raises(Fenced):
        old.register_snapshot(run.id, 0, "file", "sha")
    with pytest.raises(Fenced):
        old.fail_run(run.id, run.tenant)
    with pytest.raises(Fenced):
        old.forget(run.id)
    with pytest.raises(Fenced):
        old.heartbeat(beat)
    assert log.everything() == before


async def test_a_replaced_scheduler_can_write_nothing(log: Log) -> None:
    run = await log.new_run()
    old = log.dispatch
    await old.resign()
    log.dispatch = Dispatch(log.connection, "successor")
    assert await log.dispatch.lead()
    before = log.everything()
    queue = (await old.ready(POOL))[0]

    with pytest.raises(Fenced):
        await old.plan(POOL, Step(1, WORKER, queue.ops, 0.0, {run.id: run.tenant}))
    with pytest.raises(Fenced):
        await old.expire_gap(POOL, run.id, TenantId("a"))
    assert not await old.lead()
    await old.resign()
    assert log.everything() == before
    assert log.redis.get(redis_keys.scheduler_lease()) == b"successor"


async def test_the_next_worker_finds_the_step_its_predecessor_left(log: Log) -> None:
    await log.new_run()
    step = await log.plan()
    successor = log.new_worker()
    assert successor.open_steps() == [step]
    log.execution = successor
    log.commit(step)
    assert successor.open_steps() == []


async def test_another_workers_start_does_not_fence_this_one(log: Log) -> None:
    run = await log.new_run()
    step = await log.plan()
    log.redis.incr(redis_keys.worker_epoch(POOL, WorkerId("w1")))
    log.commit(step)
    assert log.result(run, 0)


async def test_a_scheduler_leads_while_it_renews_and_the_next_one_has_a_newer_epoch(log: Log) -> None:
    first, second = log.dispatch, Dispatch(log.connection, "second")
    epoch = first.epoch
    assert await first.lead()
    assert first.epoch == epoch
    assert not await second.lead()
    log.redis.delete(redis_keys.scheduler_lease())  # it ran out
    assert await second.lead()
    assert second.epoch > epoch
    assert not await first.lead()
    await second.resign()
    assert await first.lead()
    assert first.epoch > second.epoch
