"""Lifetime of a result: until its client has certainly read it, or for a day."""

from __future__ import annotations

import asyncio
import time

import pytest

from cotrain_store import redis_keys
from cotrain_store.messages.ids import TenantId, request_id
from cotrain_store.messages.runs import RunRecord
from cotrain_store.results.delivery import READ_AFTER_S, DeliveryLog
from cotrain_store.tenants.records import Records
from tests.support import lives
from tests.support.log import Log
from tests.support.stack import POOL

NOW = 1_000.0
LATER = NOW + READ_AFTER_S + 1


def life_ms(log: Log, run: RunRecord, seq: int = 0) -> float:
    return lives.life_ms(log.redis, redis_keys.result(request_id(run.id, seq)))


async def test_a_result_whose_client_continued_is_not_kept_for_a_day(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(run.tenant, request_id(run.id, 0), POOL, NOW)
    await deliveries.expire_read(NOW + 5)
    await log.submit(run, 1)
    await deliveries.expire_read(LATER)
    assert 0 < life_ms(log, run) <= redis_keys.READ_RESULT_TTL_MS


async def test_only_the_key_of_the_session_shortens_the_life_of_its_results(log: Log) -> None:
    session = await Records(log.connection).create_session(TenantId("a"), key_id="own")
    run = await log.new_run("a", session.id)
    await log.run_all()
    deliveries = DeliveryLog(log.connection)
    left_ms: list[float] = []
    for key_id in ("other", "own"):
        deliveries.sent(run.tenant, request_id(run.id, 0), POOL, NOW, key_id)
        await deliveries.expire_read(NOW + 5)
        await log.submit(run, len(left_ms) + 1)
        await deliveries.expire_read(LATER)
        left_ms.append(life_ms(log, run))
    assert left_ms[1] <= redis_keys.READ_RESULT_TTL_MS < left_ms[0]


async def test_a_client_that_slept_overnight_still_gets_its_result(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)  # sent ahead, before it was suspended
    await log.run_all()
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(run.tenant, request_id(run.id, 0), POOL, NOW)
    for hours in range(23):
        await deliveries.expire_read(NOW + 3600 * hours)
    assert life_ms(log, run) > redis_keys.READ_RESULT_TTL_MS


async def test_a_lost_answer_can_be_requested_again_for_a_while(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(run.tenant, request_id(run.id, 0), POOL, NOW)
    await deliveries.expire_read(NOW + 5)
    await log.submit(run, 1)
    await deliveries.expire_read(NOW + READ_AFTER_S - 1)
    assert life_ms(log, run) > redis_keys.READ_RESULT_TTL_MS


async def test_an_unsent_result_is_kept(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    await log.run_all()
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(run.tenant, request_id(run.id, 1), POOL, NOW)
    await deliveries.expire_read(NOW)
    await log.submit(run, 2)
    await deliveries.expire_read(LATER)
    assert life_ms(log, run, 0) > redis_keys.READ_RESULT_TTL_MS
    assert life_ms(log, run, 1) <= redis_keys.READ_RESULT_TTL_MS


async def test_waiting_for_a_result_records_that_it_was_sent(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.SWEEP_S", 0.02)
    monkeypatch.setattr("cotrain_store.results.delivery.READ_AFTER_S", 0.0)
    run = await log.new_run()
    await log.run_all()
    async with log.futures() as futures:
        await futures.wait(run.tenant, request_id(run.id, 0), 10)
        deadline, seq = time.monotonic() + 120, 0
        while life_ms(log, run) > redis_keys.READ_RESULT_TTL_MS and time.monotonic() < deadline:
            seq += 1
            await log.submit(run, seq)
            await asyncio.sleep(0.02)
    assert life_ms(log, run) <= redis_keys.READ_RESULT_TTL_MS
