"""Results of sample requests: found, pending, expired; and never somebody else's."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, RESULTS
from cotrain_store.errors import RequestNotFound, SampleExpired
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RequestId, TenantId, parse_sample, sampler_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.results.delivery import READ_AFTER_S, DeliveryLog
from cotrain_store.results.futures import NO_WORKER, Pending
from tests.support.lives import life_ms
from tests.support.log import WORKER
from tests.support.samples import BODY, RESULT, Samples, sampler_record
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
    monkeypatch.setattr("cotrain_store.results.delivery.READ_AFTER_S", 0.0)
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    samples.resolve(*samples.claim())
    samples.log.redis.set(redis_keys.session_heartbeat(sampler.session), "now")
    name = redis_keys.result(request)
    async with samples.log.futures() as futures:
        await futures.wait(A, request, 10)
        await until(lambda: life_ms(samples.log.redis, name) <= redis_keys.READ_RESULT_TTL_MS)
