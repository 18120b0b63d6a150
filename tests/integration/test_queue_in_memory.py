"""The scheduler's queue in memory against a real Redis: missed changes are read again, stale plans refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from cotrain_scheduler.scheduler import Scheduler
from cotrain_store import redis_keys
from cotrain_store.errors import PlanOutdated
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ops import OpKind, RunQueue, Step
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog import dispatch as dispatch_module
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.redis_client.connection import open_connection, open_sync_connection
from cotrain_store.settings import SchedulerSettings
from tests.support.log import WORKER, Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL
from tests.support.waiting import until


def give_heartbeat(log: Log) -> None:
    beat = WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 0, 0, 0.0)
    log.redis.set(redis_keys.worker(POOL, WORKER), json.dumps(asdict(beat)))


class CountingDispatch(Dispatch):
    """Counts how often everything is read."""

    full_reads = 0

    @override
    async def ready(self, pool: Any) -> list[RunQueue]:
        self.full_reads += 1
        return await super().ready(pool)


def has_read(dispatch: CountingDispatch, times: int) -> bool:
    return dispatch.full_reads >= times


@contextlib.asynccontextmanager
async def scheduling(url: str, name: str) -> AsyncIterator[CountingDispatch]:
    """Run a scheduler in this process."""
    connection = open_connection(url)
    dispatch = CountingDispatch(connection, name)
    clock = Scheduler(dispatch, SchedulerSettings(redis_url=url, data_dir=Path("/nowhere")))
    running = asyncio.create_task(clock.run())
    try:
        yield dispatch
    finally:
        clock.stop()
        await running
        await connection.aclose()


async def ran(log: Log, run: RunRecord, seq: int) -> None:
    """Commit an op once it was planned."""
    await until(log.execution.open_steps)
    [step] = log.execution.open_steps()
    assert [op.id for op in step.ops] == [(run.id, seq)]
    log.commit(step)


@pytest.fixture
async def led(log: Log) -> Log:
    """A log that a scheduler can lead."""
    give_heartbeat(log)
    await log.dispatch.resign()
    return log


async def test_what_came_while_nobody_listened_is_planned(led: Log, empty_redis: EmbeddedRedis) -> None:
    async with scheduling(empty_redis.url, "one") as dispatch:
        run = await led.new_run()
        await ran(led, run, 0)
        for seq in range(1, 4):
            reads = dispatch.full_reads + 1
            led.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await led.submit(run, seq)
            await ran(led, run, seq)
            await until(functools.partial(has_read, dispatch, reads))


async def test_without_a_single_message_everything_is_planned_from_changes_alone(
    led: Log, empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(_: Dispatch) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield None

    monkeypatch.setattr(Dispatch, "wakes", silence)
    async with scheduling(empty_redis.url, "one") as dispatch:
        run = await led.new_run()
        for seq in range(4):
            if seq:
                await led.submit(run, seq)
            await ran(led, run, seq)
        assert dispatch.full_reads == 1


async def test_a_change_that_nobody_noted_is_found(led: Log, empty_redis: EmbeddedRedis) -> None:
    async with scheduling(empty_redis.url, "one") as dispatch:
        run = await led.new_run()
        await ran(led, run, 0)
        before = dispatch.full_reads
        led.redis.eval(  # at once, as an API process of the version before would
            "redis.call('HSET', KEYS[1], 1, ARGV[1]) redis.call('HSET', KEYS[2], 'last', 1) "
            "redis.call('ZADD', KEYS[3], 0, ARGV[2])",
            3, redis_keys.ops(POOL, run.id), redis_keys.log(POOL, run.id), redis_keys.ready(POOL),
            "forward|7|4|1.0|inline", run.id,
        )  # fmt: skip
        await ran(led, run, 1)
        assert dispatch.full_reads == before + 1


async def test_redis_starts_again_and_the_queue_is_read_anew(tmp_path: Path) -> None:
    from tests.support.log import open_log

    with EmbeddedRedis() as redis:
        async with open_log(redis.url, tmp_path) as log:
            give_heartbeat(log)
            await log.dispatch.resign()
            async with scheduling(redis.url, "one") as dispatch:
                run = await log.new_run()
                await ran(log, run, 0)
                reads = dispatch.full_reads + 1
                redis.kill()
                await asyncio.to_thread(redis.restart)
                await log.submit(run, 1)
                await ran(log, run, 1)
                await until(functools.partial(has_read, dispatch, reads))


async def test_two_schedulers_take_turns_and_each_op_is_planned_once(led: Log, empty_redis: EmbeddedRedis) -> None:
    async with scheduling(empty_redis.url, "one") as one:
        run = await led.new_run()
        await ran(led, run, 0)
        async with scheduling(empty_redis.url, "two") as two:
            await led.submit(run, 1)
            await ran(led, run, 1)
            # The lease of the first runs out while it stands still; its queue is stale when it leads again.
            with open_sync_connection(empty_redis.url) as connection:
                connection.set(redis_keys.scheduler_lease(), "nobody", px=1)
            await until(lambda: two.epoch > one.epoch or one.epoch > 1)
            await led.submit(run, 2)
            await ran(led, run, 2)
        await led.submit(run, 3)
        await ran(led, run, 3)
    assert led.queued() == (0, 0, 0)


async def test_a_plan_of_a_queue_that_is_not_the_logs_writes_nothing(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    [queue] = await log.dispatch.ready(POOL)
    step = Step(1, WORKER, queue.ops, 0.0, {run.id: run.tenant})
    was = queue.ops[1].envelope()
    assert was.startswith("forward_backward|")
    log.redis.hset(redis_keys.ops(POOL, run.id), 1, was.replace("forward_backward", "rejected"))
    before = log.everything()
    with pytest.raises(PlanOutdated):
        await log.dispatch.plan(POOL, step)
    assert log.everything() == before


async def test_changes_are_told_again_until_a_plan_says_that_they_were_seen(log: Log) -> None:
    first, second = await log.new_run("a", "one"), await log.new_run("b", "two")
    await log.submit(first, 1)
    changes = await log.dispatch.view(POOL, 0)
    assert [queue.run for queue in changes.queues] == [second.id, first.id]
    assert (changes.number, changes.ready, changes.is_complete) == (3, 2, True)
    assert await log.dispatch.view(POOL, 0) == changes
    assert (await log.dispatch.view(POOL, 3)).queues == []
    ops = changes.queues[0].ops
    step = Step(1, WORKER, ops, 0.0, {second.id: second.tenant})
    await log.dispatch.plan(POOL, step, seen=2)
    assert log.redis.zrange(redis_keys.changed(POOL), 0, -1) == [first.id.encode()]


async def test_many_changes_come_in_parts(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "RUNS_AT_ONCE", 2)
    runs = [await log.new_run("a", f"session-{n}") for n in range(5)]
    seen, found = 0, list[str]()
    while True:
        changes = await log.dispatch.view(POOL, seen)
        found += [queue.run for queue in changes.queues]
        seen = changes.number
        if changes.is_complete:
            break
    assert found == [run.id for run in runs]
    assert seen == 5


async def test_who_closes_a_run_is_heard(log: Log) -> None:
    run = await log.new_run()
    seen = (await log.dispatch.view(POOL, 0)).number
    await log.intake.close_run(run)
    changes = await log.dispatch.view(POOL, seen)
    assert [(queue.run, queue.ops) for queue in changes.queues] == [(run.id, ())]
    assert changes.ready == 0


async def test_more_ops_than_are_read_at_once_are_all_planned_in_order(
    led: Log, empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_module, "MAX_OPS_PER_RUN", 4)
    monkeypatch.setattr("cotrain_scheduler.pool_scheduler.MAX_OPS_PER_RUN", 4)
    run = await led.new_run()
    for seq in range(1, 14):
        await led.submit(run, seq, OpKind.OPTIM_STEP)
    async with scheduling(empty_redis.url, "one") as dispatch:
        planned = list[int]()
        while len(planned) < 14:
            await until(led.execution.open_steps)
            [step] = led.execution.open_steps()
            planned += [op.seq for op in step.ops]
            led.commit(step)
        assert planned == list(range(14))
        assert dispatch.full_reads <= 2  # at the start, and once it listens
