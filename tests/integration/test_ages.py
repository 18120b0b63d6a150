"""Expiry by the store's own clock, independent of the host's time of day."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, RESULTS, SpoolRef
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import request_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.dispatch import ENDS_AT_ONCE, MAX_STEP_S, Dispatch
from cotrain_store.redis_client.connection import clock_ms
from cotrain_store.results.delivery_log import READ_AFTER_S, DeliveryLog
from tests.support.lives import life_ms, pass_time
from tests.support.log import Log
from tests.support.stack import POOL

DAY_MS = 24 * 3600e3
LARGE = Result(ResultKind.PASS, b"x" * (INLINE_LIMIT_BYTES + 1))


@pytest.fixture
def wait_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the scheduler's monotonic clock; the host's time of day is unchanged."""
    now = [1_000.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("cotrain_store.oplog.dispatch.time.monotonic", lambda: now[0])
    return wait


async def resolved(log: Log, result: Result) -> RunRecord:
    run = await log.new_run()
    log.execution.commit(await log.plan(), {(run.id, 0): result}, {}, {})
    return run


def counted(log: Log) -> dict[bytes, bytes]:
    rows: dict[bytes, bytes] = log.redis.hgetall(redis_keys.spool_results())
    return rows


async def test_the_store_clock_advances_by_the_time_the_scheduler_counted(
    log: Log, wait_s: Callable[[float], None]
) -> None:
    await log.dispatch.pass_time()
    began = await clock_ms(log.connection)
    assert began == pytest.approx(log.redis.time()[0] * 1000, abs=60e3)
    wait_s(1.5)
    await log.dispatch.pass_time()
    assert await clock_ms(log.connection) == began + 1_500


async def test_time_without_a_scheduler_does_not_count(log: Log, wait_s: Callable[[float], None]) -> None:
    await log.dispatch.pass_time()
    began = await clock_ms(log.connection)
    wait_s(26 * 3600)  # stopped, or without Redis
    await log.dispatch.pass_time()
    assert await clock_ms(log.connection) == began + MAX_STEP_S * 1_000
    await log.dispatch.resign()
    successor = Dispatch(log.connection, "successor")
    assert await successor.lead()
    assert not await log.dispatch.lead()
    wait_s(5)
    await successor.pass_time()  # counts from here on
    assert await clock_ms(log.connection) == began + MAX_STEP_S * 1_000


async def test_a_replaced_scheduler_does_not_advance_the_clock(log: Log) -> None:
    await log.dispatch.pass_time()
    await log.dispatch.resign()
    await Dispatch(log.connection, "successor").lead()
    before = log.everything()
    with pytest.raises(Fenced):
        await log.dispatch.pass_time()
    assert log.everything() == before


async def test_a_result_and_its_file_expire_by_the_store_clock(log: Log) -> None:
    run = await resolved(log, LARGE)
    stored = log.result(run, 0)
    assert stored
    segment = SpoolRef.parse(stored.payload.decode()).segment
    assert segment.startswith(RESULTS)
    assert counted(log) == {segment.encode(): b"1"}
    assert segment in log.execution.spool_references.referenced()
    pass_time(log.redis, redis_keys.LARGE_RESULT_TTL_MS - 60_000)
    await log.dispatch.pass_time()
    assert log.result(run, 0) == stored
    pass_time(log.redis, 120_000)
    await log.dispatch.pass_time()
    assert log.result(run, 0) is None
    assert counted(log) == {}
    assert log.redis.zcard(redis_keys.ends()) == 0


async def test_many_results_that_expire_together_are_all_removed(log: Log) -> None:
    names = [f"cotrain:result:{number}" for number in range(2 * ENDS_AT_ONCE + 1)]
    log.redis.mset(dict.fromkeys(names, b"k"))
    log.redis.zadd(redis_keys.ends(), dict.fromkeys(names, 0))
    await log.dispatch.pass_time()
    assert log.redis.exists(*names) == log.redis.zcard(redis_keys.ends()) == 0


async def test_the_clock_of_redis_expires_no_result(log: Log) -> None:
    run = await resolved(log, Result.of_json({}))
    key = redis_keys.result(request_id(run.id, 0))
    assert log.redis.pttl(key) == -1
    assert life_ms(log.redis, key) == pytest.approx(DAY_MS, abs=60e3)


async def test_results_expire_in_a_full_redis(log: Log) -> None:
    runs = [await resolved(log, each) for each in (LARGE, Result.of_json({}))]
    pass_time(log.redis, 2 * DAY_MS)
    before = log.redis.config_get("maxmemory")["maxmemory"]
    log.redis.config_set("maxmemory", 1)
    try:
        await log.dispatch.resign()
        successor = Dispatch(log.connection, "successor")
        assert await successor.lead()
        await successor.pass_time()
    finally:
        log.redis.config_set("maxmemory", before)
    assert [log.result(run, 0) for run in runs] == [None, None]
    assert counted(log) == {}


async def test_fetched_results_expire_sooner_in_a_full_redis(log: Log) -> None:
    run = await resolved(log, Result.of_json({}))
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(run.tenant, request_id(run.id, 0), POOL, 0.0)
    await deliveries.expire_read(0.0)
    await log.submit(run, 1)
    before = log.redis.config_get("maxmemory")["maxmemory"]
    log.redis.config_set("maxmemory", 1)
    try:
        await deliveries.expire_read(READ_AFTER_S + 1)
    finally:
        log.redis.config_set("maxmemory", before)
    key = redis_keys.result(request_id(run.id, 0))
    assert life_ms(log.redis, key) <= redis_keys.READ_RESULT_TTL_MS


async def test_the_age_of_a_gap_is_measured_by_the_store_clock(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    await log.dispatch.pass_time()
    await log.submit(run, 2)
    pass_time(log.redis, 59_000)
    assert await log.dispatch.old_gaps(POOL, 60) == []
    pass_time(log.redis, 2_000)
    assert [gap for gap, _ in await log.dispatch.old_gaps(POOL, 60)] == [run.id]


async def test_a_lease_from_before_a_backward_time_change_has_expired(log: Log) -> None:
    standby = Dispatch(log.connection, "standby")
    assert not await standby.lead()
    log.redis.pexpire(redis_keys.scheduler_lease(), int(26 * 3600e3))
    assert await standby.lead()
