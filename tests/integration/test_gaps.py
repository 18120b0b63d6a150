"""A missing seq_id: later ops wait, are never skipped, and fail only with an error."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cotrain_scheduler.clock import Clock
from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.messages.ids import request_id
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import RunRecord
from cotrain_store.settings import SchedulerSettings
from tests.support.log import Log, open_log
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


@pytest.fixture
async def run(log: Log) -> RunRecord:
    """A run whose seq 1 is missing: 2 and 3 wait for it."""
    run = await log.new_run()
    await log.run_all()
    await log.submit(run, 2, body=LARGE)
    await log.submit(run, 3)
    return run


async def gaps(log: Log, older_than_s: float = -1.0) -> list[str]:
    return [run for run, _ in await log.dispatch.old_gaps(POOL, older_than_s)]


async def test_ops_after_a_gap_are_never_planned(log: Log, run: RunRecord) -> None:
    assert await log.dispatch.ready(POOL) == []
    assert await gaps(log) == [run.id]
    assert await gaps(log, older_than_s=60) == []


async def test_the_missing_request_closes_the_gap(log: Log, run: RunRecord) -> None:
    await log.submit(run, 1)
    assert await gaps(log) == []
    assert [op.seq for op in (await log.plan()).ops] == [1, 2, 3]


async def test_a_gap_that_opens_after_a_plan_is_found(log: Log, run: RunRecord) -> None:
    await log.submit(run, 5)
    await log.submit(run, 1)
    log.commit(await log.plan())
    assert await gaps(log) == [run.id]
    assert await log.dispatch.ready(POOL) == []


async def test_a_gap_keeps_its_age_while_later_ops_arrive(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.submit(run, 4)
    assert await gaps(log, older_than_s=90) == [run.id]


async def test_expiry_fails_waiting_ops_and_skips_none(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    for seq in (2, 3):
        failure = log.result(run, seq)
        assert failure is not None
        assert failure.json()["category"] == "server"
        assert "seq_id 1 of this run never reached the server" in failure.json()["error"]
        assert "a new training client from the last checkpoint" in failure.json()["error"]
    assert log.result(run, 1) is None
    assert await log.dispatch.ready(POOL) == []
    assert await gaps(log) == []
    assert log.references() == {}
    assert log.queued() == (0, 0, 0)  # they keep their seq, and wait for nothing


async def test_a_repeated_expiry_has_no_effect(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    before = log.everything()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.everything() == before


async def test_the_missing_request_runs_after_expiry_and_failed_ones_stay_failed(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    told = [log.result(run, seq) for seq in (2, 3)]
    await log.submit(run, 1)
    await log.submit(run, 4)
    step = await log.plan()
    kinds = [(op.seq, op.kind) for op in step.ops]
    passed, failed = OpKind.FORWARD_BACKWARD, OpKind.REJECTED
    assert kinds == [(1, passed), (2, failed), (3, failed), (4, passed)]
    log.commit(step)
    assert log.result(run, 1) == log.result(run, 4) == Result.of_json({"said": "done"})
    assert [log.result(run, seq) for seq in (2, 3)] == told
    assert log.queued() == (0, 0, 0)


async def test_a_failed_op_counts_again_while_it_can_run(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 5)
    await log.submit(run, 1)
    ops, tokens, _ = log.queued()
    assert (ops, tokens) == (4, 14)  # 1 and 5 are passes of 7 tokens; 2 and 3 only keep their seq
    log.commit(await log.plan())
    assert await gaps(log) == [run.id]  # seq 4
    assert log.queued()[:2] == (1, 7)
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.queued() == (0, 0, 0)


async def test_a_run_that_ends_after_its_gap_leaves_an_empty_queue(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 4)
    await log.intake.close_run(run)
    assert log.queued() == (0, 0, 0)


async def test_a_gap_that_closed_just_before_its_expiry_fails_nothing(log: Log, run: RunRecord) -> None:
    await log.submit(run, 1)
    before = log.everything()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.everything() == before


async def test_a_request_after_an_expired_gap_is_as_late_as_those_before(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 5)
    assert log.result(run, 5) is None
    assert await gaps(log, older_than_s=90) == [run.id]
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.result(run, 5) is not None
    assert log.queued() == (0, 0, 0)


async def test_a_new_gap_after_a_closed_one_has_its_own_age(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 1)
    log.commit(await log.plan())
    await log.submit(run, 5)
    assert await gaps(log) == [run.id]
    assert await gaps(log, older_than_s=90) == []


async def test_a_repeat_of_a_failed_request_gets_its_failure(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert await log.submit(run, 3) == f"{run.id}:3"
    assert log.result(run, 3) is not None
    assert log.queued() == (0, 0, 0)


async def test_the_scheduler_expires_old_gaps_only(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    settings = SchedulerSettings(redis_url=empty_redis.url, data_dir=tmp_path, gap_limit_s=60)
    async with open_log(empty_redis.url, tmp_path) as log:
        old, young = await log.new_run("a"), await log.new_run("b")
        await log.run_all()
        for run in (old, young):
            await log.submit(run, 2)
        log.redis.zadd(redis_keys.gaps(POOL), {old.id: (time.time() - 61) * 1000})
        clock = Clock(log.dispatch, settings)
        ticking = asyncio.create_task(clock.run())
        async with log.futures() as futures, asyncio.timeout(120):
            assert isinstance(await futures.wait(old.tenant, request_id(old.id, 2), 30), Result)
        clock.stop()
        await ticking
        assert log.result(young, 2) is None
