"""Results of sample requests, asked for singly or by one poll for many: found, pending, expired; only for their owner."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, RESULTS
from cotrain_store.errors import RequestNotFound, SampleExpired
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import CLONE_SIZE, OWN_SEQS, RequestId, TenantId, parse_sample, sample_id, sampler_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.results.completions import Completion, Completions
from cotrain_store.results.delivery_log import READ_AFTER_S, DeliveryLog
from cotrain_store.results.pending import NO_WORKER, Pending
from tests.support.lives import life_ms, pass_time
from tests.support.log import WORKER
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import BODY, RESULT, Samples, open_samples, sampler_record
from tests.support.stack import POOL
from tests.support.waiting import until

A, B = TenantId("a"), TenantId("b")
PATIENCE_S = 120.0
NEVER_S = 1e6
NOW = 1_000.0
LATER = NOW + READ_AFTER_S + 1


async def test_a_poll_is_pending_until_the_result_is_there(samples: Samples) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    async with samples.log.futures() as futures:
        assert await futures.wait(A, request, 0.01) == NO_WORKER
        samples.claim()
        assert await futures.wait(A, request, 0.01) == NO_WORKER
        poll = asyncio.create_task(futures.wait(A, request, PATIENCE_S))
        await until(lambda: futures.waiters)
        samples.resolve(request)
        assert await poll == RESULT
        assert await futures.wait(A, request, 0) == RESULT


async def test_a_poll_says_where_its_request_stands(samples: Samples) -> None:
    sampler, other = await samples.sampler(), await samples.sampler(B)
    first, _, last = await samples.submit(sampler, 0, 1, 2)
    await samples.submit(other, 0)
    each = len(BODY.prompt) + (BODY.max_tokens or 0)
    beat = WorkerHeartbeat(WORKER, 1, "serving", "cpu", 1.0, 0, 0, 0.0, sample_tokens_per_s=each / 10)
    samples.log.redis.set(redis_keys.worker(POOL, WORKER), json.dumps(asdict(beat)))
    told = (
        "one of your 3 sample requests ({}), next to 1 other tenant with work; "
        "at most about 40 s for all that you have sent"
    )
    async with samples.log.futures() as futures:
        assert await futures.wait(A, last, 0.01) == Pending(reason=told.format("2 before it wait"))
        samples.claim(1)
        assert await futures.wait(A, first, 0.01) == Pending(reason=told.format("with a worker"))
        assert await futures.wait(A, last, 0.01) == Pending(reason=told.format("1 before it wait"))


async def test_a_large_result_comes_from_disk_and_expires_with_its_file(samples: Samples) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    samples.claim()
    large = Result(ResultKind.SAMPLE, b"x" * (INLINE_LIMIT_BYTES + 1))
    samples.resolve(request, result=large)
    async with samples.log.futures() as futures:
        assert await futures.wait(A, request, 0.01) == large
        for path in samples.log.results.folder.glob(f"{RESULTS}*"):
            path.unlink()
        with pytest.raises(SampleExpired):
            await futures.wait(A, request, 0.01)


async def test_the_result_outlives_its_sampler(samples: Samples) -> None:
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    samples.log.redis.delete(redis_keys.sampler(sampler.id))
    async with samples.log.futures() as futures:
        assert await futures.wait(A, request, 0.01) == Pending()
        samples.resolve(*samples.claim())
        assert await futures.wait(A, request, 0.01) == RESULT


async def test_an_expired_result_can_be_asked_for_again(samples: Samples) -> None:
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    samples.resolve(*samples.claim())
    samples.log.redis.delete(redis_keys.result(request))
    async with samples.log.futures() as futures:
        with pytest.raises(SampleExpired, match="expired"):
            await futures.wait(A, request, NEVER_S)  # nothing will come: it is told at once
        samples.log.redis.delete(redis_keys.sample(request))
        with pytest.raises(SampleExpired):
            await futures.wait(A, request, 0.01)
        samples.log.redis.delete(redis_keys.sampler(sampler.id))
        with pytest.raises(RequestNotFound) as unknown:
            await futures.wait(A, request, 0.01)
        assert not isinstance(unknown.value, SampleExpired)


@pytest.mark.parametrize("is_known", [True, False])
async def test_another_tenants_request_is_as_unknown_as_one_that_never_was(samples: Samples, is_known: bool) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    samples.resolve(*samples.claim())
    if not is_known:
        samples.log.redis.delete(redis_keys.sample(request))
    async with samples.log.futures() as futures:
        with pytest.raises(RequestNotFound) as foreign:
            await futures.wait(B, request, 0.01)
        with pytest.raises(RequestNotFound) as unknown:
            await futures.wait(B, RequestId("nobody:sample:0:0"), 0.01)
        assert type(foreign.value) is type(unknown.value) is RequestNotFound
        assert str(foreign.value) == str(unknown.value)


@pytest.mark.parametrize("place", ["", "x", "-1", "1:0", " 0", "0 ", "\u0663", "9" * 5_000, "*", "\ud800", "0\n"])
async def test_what_is_no_place_names_no_request(samples: Samples, place: str) -> None:
    sampler = await samples.sampler()
    async with samples.log.futures() as futures:
        with pytest.raises(RequestNotFound) as unknown:
            await futures.wait(A, RequestId(f"{sampler.id}:{place}"), 0.01)
        assert not isinstance(unknown.value, SampleExpired)


async def test_a_result_that_was_sent_to_a_living_session_is_not_kept_for_a_day(samples: Samples) -> None:
    session = await samples.records.create_session(A)
    first, second = f"{session.id}:sample:0", "asleep:sample:0"
    deliveries = DeliveryLog(samples.log.connection)
    requests = [RequestId(f"{sampler}:0") for sampler in (first, second)]
    for request in requests:
        name = parse_sample(request)
        assert name
        samples.log.redis.set(redis_keys.result(request), RESULT.encode())
        ends = time.time() * 1000 + redis_keys.SMALL_RESULT_TTL_MS
        samples.log.redis.zadd(redis_keys.ends(), {redis_keys.result(request): ends})
        samples.log.redis.hset(redis_keys.sample(request), "state", "done")
        samples.log.redis.zadd(redis_keys.completions(name.sampler, 0), {"0": 1, "1": 2})
        deliveries.sent(A, request, name, NOW)

    def lives_ms() -> list[float]:
        return [life_ms(samples.log.redis, redis_keys.result(request)) for request in requests]

    await deliveries.expire_read(NOW + READ_AFTER_S - 1)
    assert min(lives_ms()) > redis_keys.READ_RESULT_TTL_MS
    await deliveries.expire_read(LATER)
    assert lives_ms()[0] <= redis_keys.READ_RESULT_TTL_MS < lives_ms()[1]
    told = [samples.log.redis.zcard(f"cotrain:completions:{name}:0") for name in (first, second)]
    assert told == [1, 2]


async def test_a_result_sent_to_another_key_is_kept_for_the_one_that_opened_the_session(samples: Samples) -> None:
    session = await samples.records.create_session(A, key_id="own")
    sampler = await samples.records.create_sampler(
        replace(sampler_record("a"), id=sampler_id(session.id, 0), session=session.id)
    )
    request, last = await samples.submit(sampler, 0, 1)
    samples.claim()
    samples.resolve(request)
    samples.resolve(last)
    name, deliveries = parse_sample(request), DeliveryLog(samples.log.connection)
    assert name
    left_ms = []
    for key_id in ("other", "own"):
        deliveries.sent(A, request, name, NOW, key_id)
        await deliveries.expire_read(LATER)
        told = samples.log.redis.zcard(redis_keys.completions(sampler.id, 0))
        left_ms.append((life_ms(samples.log.redis, redis_keys.result(request)), told))
    assert left_ms[0] > (redis_keys.READ_RESULT_TTL_MS, 2)
    assert left_ms[1] <= (redis_keys.READ_RESULT_TTL_MS, 1)


async def test_waiting_for_a_result_notes_that_it_was_sent(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.SWEEP_S", 0.02)
    monkeypatch.setattr("cotrain_store.results.delivery_log.READ_AFTER_S", 0.0)
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    samples.resolve(*samples.claim())
    samples.log.redis.set(redis_keys.session_heartbeat(sampler.session), "now")
    name = redis_keys.result(request)
    async with samples.log.futures() as futures:
        await futures.wait(A, request, 10)
        await until(lambda: life_ms(samples.log.redis, name) <= redis_keys.READ_RESULT_TTL_MS)


#: Longer than any wait here lasts: running into it is a failure.


async def somebody_waits(completions: Completions, count: int = 1) -> None:
    await until(lambda: completions.waiters >= count)


def names(ended: list[Completion]) -> list[RequestId]:
    return [completion.request for completion in ended]


async def test_what_ended_is_told_oldest_first_with_the_size_of_its_result(samples: Samples) -> None:
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, 2, 1, 0)
    samples.claim()
    failure = Result.failed("no", "server")
    samples.sampling.resolve({requests[0]: RESULT}, {})
    samples.sampling.resolve({requests[1]: failure}, {})
    async with samples.completions() as completions:
        ended, cursor = await completions.wait(sampler, 0, 0, 0.0)
        assert ended == [
            Completion(requests[0], failed=False, size=len(RESULT.payload)),
            Completion(requests[1], failed=True, size=len(failure.payload)),
        ]
        assert await completions.wait(sampler, 0, cursor, 0.0) == ([], cursor)


async def test_what_was_told_is_told_again_until_its_cursor_comes_back(samples: Samples) -> None:
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, *range(4))
    samples.claim()
    samples.resolve(*requests[:2])
    async with samples.completions() as completions:
        first, cursor = await completions.wait(sampler, 0, 0, 0.0)
        samples.resolve(*requests[2:])
        again, _ = await completions.wait(sampler, 0, 0, 0.0)
        assert (names(first), names(again)) == (requests[:2], requests)
        rest, end = await completions.wait(sampler, 0, cursor, 0.0)
        assert names(rest) == requests[2:]
        assert names((await completions.wait(sampler, 0, cursor, 0.0))[0]) == requests[2:]
        assert await completions.wait(sampler, 0, end, 0.0) == ([], end)


async def test_many_ends_within_one_millisecond_are_all_told(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one lost that comes when all before it are told and forgotten."""
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, *range(40))
    samples.claim()
    now = time.time()
    monkeypatch.setattr("cotrain_store.sampling.claims.time.time", lambda: now)
    told, cursor = [], 0
    async with samples.completions() as completions:
        for start in range(0, 40, 8):
            samples.resolve(*requests[start : start + 8])
            for _ in range(2):
                ended, cursor = await completions.wait(sampler, 0, cursor, 0.0)
                told += names(ended)
    assert told == requests


async def test_an_end_right_after_all_others_were_acknowledged_is_told(samples: Samples) -> None:
    """Numbers run ahead of the clock where several ends come within a millisecond."""
    samples.log.redis.set(redis_keys.clock(), 1_000_000)
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, *range(4))
    samples.claim()
    samples.resolve(*requests[:3])
    async with samples.completions() as completions:
        told, cursor = await completions.wait(sampler, 0, 0, 0.0)
        await completions.acknowledge(sampler, names(told))
        samples.resolve(requests[3])
        assert names((await completions.wait(sampler, 0, cursor, 0.0))[0]) == requests[3:]


async def test_so_many_are_told_by_one_answer(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.completions.ENTRIES_AT_ONCE", 3)
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, *range(8))
    samples.claim()
    samples.resolve(*requests)
    told, cursor = [], 0
    async with samples.completions() as completions:
        for expected in (3, 3, 2):
            ended, cursor = await completions.wait(sampler, 0, cursor, 0.0)
            assert len(ended) == expected
            told += names(ended)
    assert told == requests


async def test_each_copy_of_a_client_hears_of_its_own_requests(samples: Samples) -> None:
    sampler, other = await samples.sampler(), await samples.sampler(number=1)
    clone = 179788117
    seqs = [5, clone * CLONE_SIZE, clone * CLONE_SIZE + 1]
    requests = await samples.submit(sampler, *seqs)
    await samples.submit(other, 5)
    samples.resolve(*samples.claim())
    async with samples.completions() as completions:
        assert names((await completions.wait(sampler, 0, 0, 0.0))[0]) == requests[:1]
        assert names((await completions.wait(sampler, clone, 0, 0.0))[0]) == requests[1:]
        assert names((await completions.wait(sampler, 1, 0, 0.0))[0]) == []
        assert names((await completions.wait(other, 0, 0, 0.0))[0]) == [sample_id(other.id, 5)]


async def test_nobody_is_told_of_the_servers_own_requests(samples: Samples) -> None:
    sampler = await samples.sampler()
    await samples.submit(sampler, OWN_SEQS - 1, OWN_SEQS, 2**63 - 1)
    samples.resolve(*samples.claim())
    told = samples.log.redis.keys("cotrain:completions:*")
    assert told == [redis_keys.completions(sampler.id, (OWN_SEQS - 1) // CLONE_SIZE).encode()]


async def test_a_poll_is_held_until_something_ends(samples: Samples) -> None:
    sampler, other = await samples.sampler(), await samples.sampler(number=1)
    (request,) = await samples.submit(sampler, 0)
    (of_other,) = await samples.submit(other, 0)
    samples.claim()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        samples.resolve(of_other)
        await asyncio.sleep(0.05)
        assert not poll.done()
        samples.resolve(request)
        assert names((await poll)[0]) == [request]
        assert completions.waiters == 0


async def test_a_cancelled_request_is_told_as_failed(samples: Samples) -> None:
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        await samples.intake.cancel(sampler.tenant, request)
        ended, _ = await poll
        assert [(one.request, one.failed) for one in ended] == [(request, True)]


async def test_a_poll_that_runs_out_of_time_keeps_its_cursor(samples: Samples) -> None:
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        assert await completions.wait(sampler, 0, 17, 0.01) == ([], 17)
        assert await completions.wait(sampler, 0, 2**63 - 1, 0.0) == ([], 2**63 - 1)


async def test_a_poll_without_a_timeout_is_held_for_a_while(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.completions.HOLD_S", 0.02)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        assert await completions.wait(sampler, 0, 0, None) == ([], 0)


async def test_the_sweep_finds_what_no_message_told(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.results.completions.SWEEP_S", 0.02)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        samples.log.redis.zadd(redis_keys.completions(sampler.id, 0), {"3": 1})
        assert await poll == ([Completion(sample_id(sampler.id, 3), failed=False, size=0)], 1)


async def test_a_new_subscription_looks_for_what_was_told_while_there_was_none(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.results.completions.SWEEP_S", NEVER_S)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        with samples.log.redis.pipeline(transaction=True) as at_once:
            at_once.execute_command("CLIENT KILL TYPE pubsub")
            at_once.zadd(redis_keys.completions(sampler.id, 0), {"3": 1})
            at_once.execute()
        assert names((await poll)[0]) == [sample_id(sampler.id, 3)]


async def test_a_poll_survives_a_kill_of_redis(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_samples(server.url, tmp_path) as samples:
            sampler = await samples.sampler()
            (request,) = await samples.submit(sampler, 0)
            samples.claim()
            async with samples.completions() as completions:
                poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
                await somebody_waits(completions)
                await asyncio.to_thread(server.kill)
                assert await completions.wait(sampler, 0, 3, 0.0) == ([], 3)
                await asyncio.to_thread(server.restart)
                await asyncio.to_thread(samples.resolve, request)
                assert names((await poll)[0]) == [request]


async def test_a_process_that_drains_answers_every_poll(samples: Samples) -> None:
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 9, NEVER_S))
        await somebody_waits(completions)
        completions.release_all()
        assert await poll == ([], 9)
        assert await completions.wait(sampler, 0, 9, NEVER_S) == ([], 9)


async def test_an_end_is_told_for_a_day(samples: Samples) -> None:
    sampler = await samples.sampler()
    await samples.submit(sampler, 0, 1)
    samples.claim()
    samples.resolve(sample_id(sampler.id, 0))
    name = redis_keys.completions(sampler.id, 0)
    assert life_ms(samples.log.redis, name) == pytest.approx(24 * 3600e3, abs=60e3)
    pass_time(samples.log.redis, redis_keys.COMPLETION_TTL_MS + 1_000)
    samples.resolve(sample_id(sampler.id, 1))
    assert samples.log.redis.zrange(name, 0, -1) == [b"1"]


async def test_what_is_acknowledged_need_not_be_kept(samples: Samples) -> None:
    sampler, other = await samples.sampler(), await samples.sampler("b")
    requests = await samples.submit(sampler, 0, 1, 2)
    (foreign,) = await samples.submit(other, 0)
    samples.claim()
    samples.resolve(foreign, *requests[:2])
    hostile = ["", "x", "\ud800", f"{sampler.id}:", f"{sampler.id}:0:0", "9" * 5_000]
    async with samples.completions() as completions:
        await completions.acknowledge(sampler, [requests[0], requests[2], foreign, *hostile])
        await completions.acknowledge(sampler, [])
    lives = [life_ms(samples.log.redis, redis_keys.result(r)) for r in (requests[0], requests[1], foreign)]
    assert 0 < lives[0] <= redis_keys.READ_RESULT_TTL_MS
    assert min(lives[1:]) > redis_keys.READ_RESULT_TTL_MS
    assert life_ms(samples.log.redis, redis_keys.sample(requests[0])) > lives[0]
    assert life_ms(samples.log.redis, redis_keys.sample(requests[2])) == -1  # still waiting
    samples.resolve(requests[2])
    assert samples.result(requests[2]) == RESULT
