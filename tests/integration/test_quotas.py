"""Quotas of a tenant: unread results, sessions, samplers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Reason, SamplerNotFound
from cotrain_store.messages.ids import RequestId, RunId, SamplerId, SessionId, TenantId
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.intake import SAMPLER_REST_MS, Intake
from cotrain_store.redis_client.connection import CONNECTION_LOST, repeat, stop_tasks
from cotrain_store.results.delivery import DeliveryLog
from cotrain_store.sampling.intake import SampleIntake, SampleLimits
from cotrain_store.tenants.policies import TenantLimits
from cotrain_store.tenants.records import RecordLimits, Records
from tests.support.limits import always
from tests.support.log import Log
from tests.support.refusals import refused
from tests.support.samples import BODY, LARGE_BODY, RESULT, Samples, sampler_record
from tests.support.stack import POOL
from tests.support.waiting import until

A = TenantId("a")
LARGE = Result(ResultKind.PASS, b"x" * (INLINE_LIMIT_BYTES + 1))


def unread(log: Log, tenant: TenantId = A) -> int:
    return int(log.redis.hget(redis_keys.unread(tenant), "bytes") or 0)


def second_of(run: RunRecord) -> RunRecord:
    return replace(run, id=RunId(f"{run.session}:train:1"))


def limited(log: Log, unread_bytes: int) -> Intake:
    return Intake(log.connection, log.spool, always(TenantLimits(unread_bytes=unread_bytes)))


async def test_results_count_completely_until_they_are_sent(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    step = await log.plan()
    results = {(run.id, 0): Result.of_json({}), (run.id, 1): LARGE}
    log.execution.commit(step, results, {}, {})
    log.execution.commit(step, results, {}, {})
    assert unread(log) == len(b"{}") + len(LARGE.payload)
    async with log.futures() as futures:
        for _ in range(2):
            assert isinstance(await futures.wait(A, RequestId(f"{run.id}:1"), 1.0), Result)
    assert unread(log) == len(b"{}")


async def test_only_a_tenant_that_fetches_nothing_is_rejected(log: Log) -> None:
    run, other = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    intake = limited(log, unread(log))
    before = log.everything()
    with refused(Reason.UNREAD_QUOTA_REACHED, match="exceed the quota unread_bytes. Fetch them"):
        await intake.create_run(second_of(run))
    assert log.everything() == before
    log.redis.hset(redis_keys.unread(other.tenant), "bytes", 0)
    await intake.create_run(second_of(other))
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(A, RequestId(f"{run.id}:0"), POOL, 0.0)
    await deliveries.flush()
    await intake.create_run(second_of(run))


async def test_a_large_request_over_the_quota_is_not_written(samples: Samples) -> None:
    log, run, sampler = samples.log, await samples.log.new_run(), await samples.sampler()
    await log.run_all()
    full = limited(log, unread(log))
    full_too = SampleIntake(log.connection, log.spool, always(SampleLimits(unread_bytes=unread(log))))
    before = log.everything()
    for _ in range(2):
        with refused(Reason.UNREAD_QUOTA_REACHED):
            await full.submit(run, 1, OpKind.FORWARD, LARGE.payload, 7, "d")
        with refused(Reason.UNREAD_QUOTA_REACHED):
            await full_too.submit(sampler, 0, LARGE_BODY)
    busy = SampleIntake(log.connection, log.spool, always(SampleLimits(bytes=1)))
    with refused(Reason.SAMPLING_BUSY):
        await busy.submit(sampler, 0, LARGE_BODY)
    assert log.everything() == before
    assert list(log.spool.folder.iterdir()) == []
    await samples.intake.submit(sampler, 0, LARGE_BODY)
    assert [claimed.body for claimed in samples.sampling.claim(1)] == [LARGE_BODY]


async def test_an_expired_result_does_not_count(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    intake = limited(log, unread(log))
    until = redis_keys.unread_until(A)
    in_ms = log.redis.zscore(until, f"{run.id}:0") - log.redis.time()[0] * 1000
    assert in_ms == pytest.approx(redis_keys.SMALL_RESULT_TTL_MS, abs=60_000)
    log.redis.zadd(until, {f"{run.id}:0": 1})
    await intake.create_run(second_of(run))
    assert unread(log) == 0


async def test_samples_count_like_other_results(samples: Samples) -> None:
    log, sampler = samples.log, await samples.sampler()
    [request] = await samples.submit(sampler, 0)
    samples.claim()
    samples.resolve(request)
    samples.resolve(request)
    assert unread(log) == len(RESULT.payload)
    intake = SampleIntake(log.connection, log.spool, always(SampleLimits(unread_bytes=unread(log))))
    with refused(Reason.UNREAD_QUOTA_REACHED):
        await intake.submit(sampler, 1, BODY)
    async with log.futures() as futures:
        assert isinstance(await futures.wait(A, request, 1.0), Result)
    await intake.submit(sampler, 1, BODY)
    assert unread(log) == 0


async def test_a_failed_write_of_redis_is_repeated(log: Log) -> None:
    taken: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    lost = iter([True, False])

    async def script(_: Any, args: Any, *stored: bytes | str) -> None:
        if next(lost):
            raise CONNECTION_LOST[0]
        taken.put_nowait(args)

    deliveries = DeliveryLog(log.connection)
    deliveries._results_sent = script
    deliveries.sent(A, RequestId("r:1"), POOL, 0.0)
    telling = asyncio.create_task(repeat("flush", 0.0, deliveries.flush))
    assert await taken.get() == {"sent": [{"tenant": "a", "request": "r:1"}]}
    await stop_tasks([telling])


async def test_a_write_that_redis_refuses_for_a_while_is_repeated_afterwards(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.FLUSH_EVERY_S", 0.01)
    run = await log.new_run()
    await log.run_all()
    # as with a disk on which Redis cannot write its RDB file
    log.redis.config_set("min-replicas-to-write", 1)
    try:
        async with log.futures() as futures:
            with capture_logs() as logs:
                assert isinstance(await futures.wait(A, RequestId(f"{run.id}:0"), 1.0), Result)
                await until(lambda: logs)
            assert logs[0]["event"] == "redis_error"
            log.redis.config_set("min-replicas-to-write", 0)
            await until(lambda: unread(log) == 0)
    finally:
        log.redis.config_set("min-replicas-to-write", 0)


async def test_only_live_sessions_are_counted(log: Log) -> None:
    records = Records(log.connection, always(RecordLimits(sessions=2)))
    first = await records.create_session(A, session_id=SessionId("first"))
    second = await records.create_session(A)
    with refused(Reason.SESSION_QUOTA_REACHED):
        await records.create_session(A)
    await records.create_session(A, session_id=first.id)  # a repeat of the first one
    await records.create_session(TenantId("b"))
    await records.finish(A, first.id, "success")
    third = await records.create_session(A)
    # no heartbeat for long
    log.redis.zadd(redis_keys.living_sessions(A), {second.id: 1, third.id: 1})
    await records.heartbeat(A, second.id)
    fourth = await records.create_session(A)
    living = log.redis.zrange(redis_keys.living_sessions(A), 0, -1)
    assert sorted(living) == sorted([second.id.encode(), fourth.id.encode()])
    with refused(Reason.SESSION_QUOTA_REACHED):
        await records.create_session(A)


async def test_samplers_are_counted_while_they_exist(samples: Samples) -> None:
    log = samples.log
    records = Records(log.connection, always(RecordLimits(samplers=2)))
    used, idle = [await records.create_sampler(sampler_record(number=n)) for n in (0, 1)]
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await records.create_sampler(sampler_record(number=2))
    assert (await records.create_sampler(sampler_record(number=1))).id == idle.id  # a repeat
    log.redis.zadd(redis_keys.tenant_samplers(A), {used.id: 1, idle.id: 1})
    await samples.submit(used, 0)  # in use: its lifetime is extended
    await records.create_sampler(sampler_record(number=3))
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await records.create_sampler(sampler_record(number=4))
    run = await log.new_run()
    await samples.save(run, 1, sampler=7)
    assert log.redis.zcard(redis_keys.tenant_samplers(A)) == 3


async def test_samplers_count_from_the_save_that_requests_them(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    intake = Intake(log.connection, log.spool, always(TenantLimits(samplers=1)))
    sampler, other = (sampler_record(number=number).id for number in (0, 1))
    first = await save_for(intake, run, 1, sampler)
    before = log.everything()
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await save_for(intake, run, 2, other)
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await Records(log.connection, always(RecordLimits(samplers=1))).create_sampler(sampler_record())
    assert await save_for(intake, run, 1, sampler) == first
    assert log.everything() == before
    log.redis.zadd(redis_keys.tenant_samplers(A), {sampler: 1})
    await save_for(intake, run, 2, other)


async def save_for(intake: Intake, run: RunRecord, seq: int, sampler: SamplerId) -> RequestId:
    return await intake.submit(run, seq, OpKind.SAVE, b"{}", 0, f"d{seq}", sampler=sampler)


async def unnamed(samples: Samples, run: RunRecord, seq: int, size: int) -> SamplerId:
    """Save without a name, and store `size` bytes."""
    await samples.save(run, seq, sampler=seq)
    samples.stored(run, seq, size)
    return sampler_record(number=seq).id


def let_rest(samples: Samples, sampler: SamplerId, rest_ms: float) -> None:
    samples.log.redis.zincrby(redis_keys.tenant_samplers(A), -rest_ms, sampler)


async def test_unused_samplers_of_unnamed_saves_are_removed_for_new_ones(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    intake = Intake(log.connection, log.spool, always(TenantLimits(sampler_bytes=50)))
    oldest, old, used = [await unnamed(samples, run, seq, 20) for seq in (1, 2, 3)]
    await samples.checkpoint(run, 4, "kept")  # counts as a checkpoint
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await save_for(intake, run, 5, SamplerId("s:sample:9"))
    let_rest(samples, oldest, SAMPLER_REST_MS + 2_000)
    let_rest(samples, old, SAMPLER_REST_MS + 1_000)
    await save_for(intake, run, 5, SamplerId("s:sample:9"))
    with pytest.raises(SamplerNotFound):
        await samples.records.sampler(A, oldest)
    for left in (old, used):  # the quota has space without them
        assert (await samples.records.sampler(A, left)).id == left
    assert [weights.ref for weights in samples.saved.unused_weights()] == [f"{run.id}:1"]
    assert log.redis.hgetall(redis_keys.sampler_bytes(A)) == {
        b"bytes": b"40", old.encode(): b"20", used.encode(): b"20"
    }  # fmt: skip


async def test_the_bytes_of_expired_samplers_do_not_count(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    sampler = await unnamed(samples, run, 1, 20)
    samples.stored(run, 1, 20)  # a repeat has no effect
    assert int(log.redis.hget(redis_keys.sampler_bytes(A), "bytes")) == 20
    log.redis.zadd(redis_keys.tenant_samplers(A), {sampler: 1})
    intake = Intake(log.connection, log.spool, always(TenantLimits(sampler_bytes=1)))
    await save_for(intake, run, 2, SamplerId("s:sample:9"))
    assert log.redis.hgetall(redis_keys.sampler_bytes(A)) == {b"bytes": b"0"}
