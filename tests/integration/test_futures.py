"""Results of requests: every waiting client is told, and a result stays until its client has read it, or for a day."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, RESULTS
from cotrain_store.errors import RequestNotFound, RunNotFound
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import OpId, RequestId, TenantId, request_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.results.delivery_log import READ_AFTER_S, DeliveryLog
from cotrain_store.results.futures import Futures
from cotrain_store.results.pending import GAP_NOTICE_S, NO_WORKER, Pending
from cotrain_store.results.queue_notice import not_yet_here, still_waiting
from cotrain_store.tenants.records import Records
from tests.support import lives
from tests.support.full_table import no_descriptor
from tests.support.log import WORKER, Log, open_log
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL
from tests.support.waiting import until

A, B = TenantId("a"), TenantId("b")
#: Longer than any wait here lasts: running into it is a failure.
PATIENCE_S = 120.0
NEVER_S = 1e6


async def everybody_waits(futures: Futures, count: int) -> None:
    await until(lambda: futures.waiters >= count)


async def test_many_waiters_share_one_subscription(log: Log) -> None:
    run = await log.new_run()
    for seq in range(1, 100):
        await log.submit(run, seq)
    async with log.futures() as futures:
        requests = [request_id(run.id, seq) for seq in range(100) for _ in range(3)]
        waits = [asyncio.create_task(futures.wait(A, r, PATIENCE_S)) for r in requests]
        await everybody_waits(futures, 300)
        channel = redis_keys.notify_results()
        assert log.redis.pubsub_numsub(channel) == [(channel.encode(), 1)]
        await log.run_all()
        assert set(await asyncio.gather(*waits)) == {Result.of_json({"said": "done"})}
        assert futures.waiters == 0


async def test_a_result_that_is_there_is_answered_at_once_and_again(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    async with log.futures() as futures:
        for _ in range(2):
            answer = await futures.wait(A, request_id(run.id, 0), 0)
            assert answer == Result.of_json({"said": "done"})


async def test_a_poll_that_runs_out_of_time_is_pending(log: Log) -> None:
    run = await log.new_run()
    async with log.futures() as futures:
        assert await futures.wait(A, request_id(run.id, 0), 0.01) == NO_WORKER
        assert futures.waiters == 0


async def test_the_sweep_finds_what_no_message_told(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.SWEEP_S", 0.02)
    run = await log.new_run()
    async with log.futures() as futures:
        wait = asyncio.create_task(futures.wait(A, request_id(run.id, 0), PATIENCE_S))
        await everybody_waits(futures, 1)
        log.redis.set(redis_keys.result(request_id(run.id, 0)), Result.of_json({"x": 1}).encode())
        assert await wait == Result.of_json({"x": 1})


async def test_a_new_subscription_looks_for_what_was_told_while_there_was_none(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.SWEEP_S", NEVER_S)
    run = await log.new_run()
    async with log.futures() as futures:
        wait = asyncio.create_task(futures.wait(A, request_id(run.id, 0), PATIENCE_S))
        await everybody_waits(futures, 1)
        with log.redis.pipeline(transaction=True) as at_once:
            at_once.execute_command("CLIENT KILL TYPE pubsub")
            at_once.set(redis_keys.result(request_id(run.id, 0)), Result.of_json({"x": 1}).encode())
            at_once.execute()
        assert await wait == Result.of_json({"x": 1})


async def test_waiters_survive_a_kill_of_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.SWEEP_S", NEVER_S)
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log, log.futures() as futures:
            run = await log.new_run()
            for seq in range(1, 50):
                await log.submit(run, seq)
            requests = [request_id(run.id, seq) for seq in range(50)]
            waits = [asyncio.create_task(futures.wait(A, r, PATIENCE_S)) for r in requests]
            await everybody_waits(futures, 50)
            await asyncio.to_thread(server.kill)
            late = asyncio.create_task(futures.wait(A, requests[7], PATIENCE_S))
            await asyncio.sleep(0.5)  # longer than the connection's own retries last
            assert not late.done()
            await asyncio.to_thread(server.restart)
            await log.dispatch.lead()
            await log.run_all()
            answers = await asyncio.gather(*waits, late)
            assert set(answers) == {Result.of_json({"said": "done"})}


async def test_a_redis_that_stays_away_is_a_pause_and_not_an_error(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log, log.futures() as futures:
            run = await log.new_run()
            await asyncio.to_thread(server.kill)
            answer = await futures.wait(A, request_id(run.id, 0), 0.3)
            assert isinstance(answer, Pending)
            assert answer.queue_state == "paused_capacity"
            assert answer.reason is not None
            assert "restarting" in answer.reason


async def test_draining_answers_everybody_now_and_from_now_on(log: Log) -> None:
    run = await log.new_run()
    async with log.futures() as futures:
        request = request_id(run.id, 0)
        waits = [asyncio.create_task(futures.wait(A, request, NEVER_S)) for _ in range(5)]
        await everybody_waits(futures, 5)
        futures.release_all()
        assert await asyncio.gather(*waits) == [Pending()] * 5
        assert await futures.wait(A, request, NEVER_S) == Pending()
        await log.run_all()
        assert isinstance(await futures.wait(A, request, NEVER_S), Result)


async def test_draining_does_not_wait_for_a_redis_that_is_away(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log, log.futures() as futures:
            run = await log.new_run()
            await asyncio.to_thread(server.kill)
            wait = asyncio.create_task(futures.wait(A, request_id(run.id, 0), NEVER_S))
            await asyncio.sleep(0)
            futures.release_all()
            answer = await asyncio.wait_for(wait, PATIENCE_S)
            assert isinstance(answer, Pending)


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_leaving_while_the_subscription_is_being_made_ends(log: Log, turns: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with log.futures():
            for _ in range(turns):
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "place", ["1", "99", "-1", "", "x", "unload", "0x0", "9" * 5_000, "\u0663", " 0", "0 ", "1:0", "*"]
)
async def test_a_request_that_never_was_is_not_found(log: Log, place: str) -> None:
    run = await log.new_run()
    async with log.futures() as futures:
        with pytest.raises(RequestNotFound):
            await futures.wait(A, RequestId(f"{run.id}:{place}"), 0.01)


@pytest.mark.parametrize("request_name", ["", ":", "0", "nobody:train:0:0", "\ud800:train:0:0"])
async def test_a_request_of_no_run_is_not_found(log: Log, request_name: str) -> None:
    async with log.futures() as futures:
        with pytest.raises(RequestNotFound):
            await futures.wait(A, RequestId(request_name), 0.01)


async def test_an_expired_result_is_not_found_and_says_so(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    log.redis.delete(redis_keys.result(request_id(run.id, 0)))
    async with log.futures() as futures:
        with pytest.raises(RequestNotFound, match="expired"):
            await futures.wait(A, request_id(run.id, 0), 0.01)


def life_ms(log: Log, run: RunRecord, seq: int = 0) -> float:
    """Return the remaining lifetime of a result."""
    return lives.life_ms(log.redis, redis_keys.result(request_id(run.id, seq)))


async def test_results_live_a_day_and_large_ones_two_hours(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    step = await log.plan()
    large = Result(ResultKind.PASS, b"x" * (INLINE_LIMIT_BYTES + 1))
    results: dict[OpId, Result] = {(run.id, 0): Result.of_json({}), (run.id, 1): large}
    log.execution.commit(step, results, {}, {})
    lives_ms = [life_ms(log, run, seq) for seq in (0, 1)]
    assert lives_ms[0] == pytest.approx(24 * 3600e3, abs=60e3)
    assert lives_ms[1] == pytest.approx(2 * 3600e3, abs=60e3)


async def test_a_large_result_comes_from_disk_and_expires_with_its_file(log: Log) -> None:
    run = await log.new_run()
    step = await log.plan()
    large = Result(ResultKind.PASS, b"x" * 1_000_000)
    log.execution.commit(step, {(run.id, 0): large}, {}, {})
    async with log.futures() as futures:
        assert await futures.wait(A, request_id(run.id, 0), 0.01) == large
        for path in log.results.folder.glob(f"{RESULTS}*"):
            path.unlink()
        with pytest.raises(RequestNotFound, match="expired"):
            await futures.wait(A, request_id(run.id, 0), 0.01)


async def test_a_process_without_descriptors_does_not_take_a_result_for_expired(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await log.new_run()
    step = await log.plan()
    large = Result(ResultKind.PASS, b"x" * (INLINE_LIMIT_BYTES + 1))
    log.execution.commit(step, {(run.id, 0): large}, {}, {})
    async with log.futures() as futures:
        with monkeypatch.context() as short:
            short.setattr("pathlib.Path.open", no_descriptor)
            assert isinstance(await futures.wait(A, request_id(run.id, 0), 0.01), Pending)
        assert await futures.wait(A, request_id(run.id, 0), 0.01) == large


async def test_a_gap_is_named_at_once_and_is_a_warning_after_two_minutes(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    await log.submit(run, 4)
    async with log.futures() as futures:
        young = await futures.wait(A, request_id(run.id, 4), 0.01)
        assert young == Pending("active", not_yet_here(1, 900.0))
        log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - GAP_NOTICE_S - 1) * 1000})
        answer = await futures.wait(A, request_id(run.id, 4), 0.01)
        assert answer == Pending("paused_capacity", still_waiting(1, 900 - GAP_NOTICE_S - 1))
        assert await futures.reasons.gap_notice(POOL, run.id) == answer.reason
        await log.submit(run, 1)
        assert await futures.wait(A, request_id(run.id, 1), 0.01) == NO_WORKER


async def test_a_poll_says_where_its_request_stands(log: Log) -> None:
    one, other = await log.new_run(), await log.new_run(tenant=B)
    for seq in (1, 2):
        await log.submit(one, seq)
    await log.submit(other, 1)
    beat = WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 7.0, 0, 0, 0.0)
    log.redis.set(redis_keys.worker(POOL, WORKER), json.dumps(asdict(beat)))
    async with log.futures() as futures:
        answer = await futures.wait(A, request_id(one.id, 2), 0.01)
        assert answer == Pending(
            "active",
            "position 3 in its run's queue, next to 1 other tenant with work; about 3 s for all that you have sent",
        )


NOW = 1_000.0
LATER = NOW + READ_AFTER_S + 1


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
    monkeypatch.setattr("cotrain_store.results.delivery_log.READ_AFTER_S", 0.0)
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


async def test_a_run_that_its_tenant_has_read_does_not_exist_for_another_one(log: Log) -> None:
    run, records = await log.new_run("a"), Records(log.connection)
    with pytest.raises(RunNotFound):
        await records.created_run(TenantId("b"), run.id)
    assert (await records.created_run(run.tenant, run.id)).pool == run.pool
    log.redis.delete(redis_keys.run(run.id))
    assert (await records.created_run(run.tenant, run.id)).pool == run.pool  # without Redis
    with pytest.raises(RunNotFound):
        await records.created_run(TenantId("b"), run.id)
