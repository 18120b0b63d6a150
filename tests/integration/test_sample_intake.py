"""Intake of sample requests: accepted once; a refused or cancelled one leaves no record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.errors import Reason, SamplerNotFound, SeqConflict
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.sampling.intake import token_limit
from cotrain_store.tenants.quotas import Quotas
from tests.support.lives import life_ms
from tests.support.log import WORKER
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.samples import BODY, LARGE_BODY, RESULT, Samples, open_samples, sampler_record
from tests.support.stack import POOL

A, B = TenantId("a"), TenantId("b")
TOKENS = len(BODY.prompt) + 4
OTHER_BODY = replace(BODY, seed=8)


async def test_a_repeat_gets_the_same_request_and_is_one_request(samples: Samples) -> None:
    sampler = await samples.sampler()
    once = await samples.intake.submit(sampler, 5, LARGE_BODY)
    before = samples.log.everything()
    again = await samples.intake.submit(sampler, 5, LARGE_BODY)
    assert again == once == f"{sampler.id}:5"
    assert samples.log.everything() == before


async def test_repeats_that_meet_are_one_request(samples: Samples) -> None:
    sampler = await samples.sampler()
    submits = (samples.intake.submit(sampler, 0, LARGE_BODY) for _ in range(40))
    assert len(set(await asyncio.gather(*submits))) == 1
    assert len(samples.claim()) == 1
    assert sum(samples.log.references().values()) == 1


async def test_a_repeat_after_the_result_runs_nothing_again(samples: Samples) -> None:
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    samples.resolve(*samples.claim())
    before = samples.log.everything()
    assert await samples.submit(sampler, 0) == [request]
    assert samples.log.everything() == before


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_seq_used_with_other_content_is_a_conflict(samples: Samples, is_done: bool) -> None:
    sampler = await samples.sampler()
    await samples.submit(sampler, 7)
    if is_done:
        samples.resolve(*samples.claim())
    before = samples.log.everything()
    with pytest.raises(SeqConflict, match="seq_id 7 was already used with different content"):
        await samples.intake.submit(sampler, 7, OTHER_BODY)
    assert samples.log.everything() == before


async def test_what_tells_a_repeat_lives_longer_than_the_result(samples: Samples) -> None:
    sampler = await samples.sampler()
    (request,) = await samples.submit(sampler, 0)
    assert life_ms(samples.log.redis, redis_keys.sample(request)) == -1
    samples.resolve(*samples.claim())
    lives = (
        life_ms(samples.log.redis, redis_keys.sample(request)),
        life_ms(samples.log.redis, redis_keys.result(request)),
    )
    assert lives[0] - lives[1] == pytest.approx(redis_keys.SAMPLE_RECORD_EXTRA_MS, abs=1e3)


async def test_a_request_makes_its_sampler_live_on(samples: Samples) -> None:
    for ephemeral, idle_ms in ((True, 6 * 3600e3), (False, 30 * 24 * 3600e3)):
        record = replace(sampler_record(number=int(ephemeral)), ephemeral=ephemeral)
        sampler = await samples.records.create_sampler(record)
        await samples.submit(sampler, 0)
        assert life_ms(samples.log.redis, redis_keys.sampler(sampler.id)) == pytest.approx(idle_ms, abs=60e3)


async def test_a_sampler_that_expired_is_refused_with_what_to_do(samples: Samples) -> None:
    sampler = await samples.sampler()
    samples.log.redis.delete(redis_keys.sampler(sampler.id))
    before = samples.log.everything()
    with pytest.raises(SamplerNotFound, match=r"6 hours without use, .* Save under a name"):
        await samples.submit(sampler, 0)
    assert samples.log.everything() == before


async def test_a_finished_session_samples_no_more_but_gets_what_it_asked_for(samples: Samples) -> None:
    session = await samples.records.create_session(A)
    record = replace(sampler_record(), session=session.id)
    sampler = await samples.records.create_sampler(record)
    (request,) = await samples.submit(sampler, 0)
    await samples.records.finish(A, session.id, "success")
    before = samples.log.everything()
    with refused(Reason.SESSION_FINISHED):
        await samples.submit(sampler, 1)
    with refused(Reason.SESSION_FINISHED):
        await samples.records.create_sampler(replace(record, id=sampler_record(number=9).id))
    assert samples.log.everything() == before
    samples.resolve(*samples.claim())
    assert samples.result(request) == RESULT


async def test_one_request_alone_is_taken_whatever_it_may_come_to(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with open_samples(empty_redis.url, tmp_path, Quotas(sample_tokens=10)) as samples:
        sampler = await samples.sampler()
        (first,) = await samples.submit(sampler, 0)
        with refused(Reason.SAMPLE_TOKENS_QUEUED, match="sample_tokens"):
            await samples.intake.submit(sampler, 1, replace(BODY, max_tokens=8))
        await samples.intake.cancel(A, first)
        await samples.intake.submit(sampler, 1, replace(BODY, max_tokens=8))


@pytest.mark.parametrize(
    ("given", "longest", "tokens"),
    [
        ({"max_tokens": 4}, 100, 7),
        ({"max_tokens": 4, "num_samples": 64}, 100, 3 + 64 * 4),
        ({"max_tokens": 400, "num_samples": 64}, 100, 3 + 64 * 97),
        ({"max_tokens": None, "num_samples": 2}, 100, 3 + 2 * 97),
        ({"max_tokens": 0}, 100, 3),
        ({"max_tokens": 4}, 0, 7),
        ({"max_tokens": None}, 0, 3),
    ],
)
def test_a_request_counts_for_all_that_it_may_come_to(given: dict[str, Any], longest: int, tokens: int) -> None:
    assert token_limit(replace(BODY, **given), longest) == tokens


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        (Quotas(samples=2), BODY),
        (Quotas(bytes=800), LARGE_BODY),
        (Quotas(sample_tokens=3 * TOKENS - 1), BODY),
        (Quotas(sample_tokens=10_000), replace(LARGE_BODY, num_samples=2_000)),
    ],
)
async def test_over_the_quota_is_refused_and_leaves_nothing_but_takes_repeats(
    empty_redis: EmbeddedRedis, tmp_path: Path, limits: Quotas, body: Any
) -> None:
    async with open_samples(empty_redis.url, tmp_path, limits) as samples:
        sampler, other = await samples.sampler("a"), await samples.sampler("b")
        await samples.submit(sampler, 0, 1)
        samples.claim(1)  # what runs counts as what waits does
        before = samples.log.everything()
        with refused(Reason.SAMPLING_BUSY, Reason.SAMPLE_TOKENS_QUEUED) as busy:
            await samples.intake.submit(sampler, 2, body)
        assert busy.value.reason.retry_after_s == 1.0
        assert samples.log.everything() == before
        await samples.submit(sampler, 1)
        await samples.submit(other, 0)

        samples.resolve(RequestId(f"{sampler.id}:0"), RequestId(f"{sampler.id}:1"))
        assert samples.load() == (0, 0, 0)
        await samples.submit(sampler, 2)


async def test_without_room_nothing_new_is_taken(
    empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_samples(empty_redis.url, tmp_path, disk_reserve_bytes=1 << 60) as samples:
        with refused(Reason.DISK_RESERVE_REACHED):
            await samples.submit(await samples.sampler(), 0)
    monkeypatch.setattr("cotrain_store.disk.capacity.MEMORY_SHARE", 1e-6)
    async with open_samples(empty_redis.url, tmp_path) as samples:
        with refused(Reason.STORE_FULL):
            await samples.submit(await samples.sampler(), 0)
        assert samples.load() == (0, 0, 0)


async def test_without_redis_nothing_is_accepted_and_afterwards_everything_is(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_samples(server.url, tmp_path) as samples:
            sampler = await samples.sampler()
            (first,) = await samples.submit(sampler, 0)
            server.kill()
            with pytest.raises(CONNECTION_LOST):
                await samples.submit(sampler, 1)
            with pytest.raises(CONNECTION_LOST):
                await samples.intake.cancel(A, first)
            server.restart()
            await samples.submit(sampler, 1)
            assert samples.claim() == [first, f"{sampler.id}:1"]


async def test_a_waiting_request_is_cancelled_at_once(samples: Samples) -> None:
    sampler = await samples.sampler()
    first = await samples.intake.submit(sampler, 0, LARGE_BODY)
    await samples.intake.cancel(A, first)
    assert samples.result(first) == CANCELLED
    assert CANCELLED.json() == {"error": "Cancelled by the client.", "category": "user"}
    assert (samples.load(), samples.log.references(), samples.claim()) == ((0, 0, 0), {}, [])


async def test_a_running_request_is_cancelled_by_its_worker(samples: Samples) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    samples.claim()
    await samples.intake.cancel(A, request)
    await samples.intake.cancel(A, request)
    assert samples.result(request) is None
    assert samples.sampling.cancelled() == [request]
    samples.resolve(request, result=CANCELLED)
    assert (samples.sampling.cancelled(), samples.load()) == ([], (0, 0, 0))


async def test_a_cancel_that_comes_too_late_changes_nothing(samples: Samples) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    samples.resolve(*samples.claim())
    before = samples.log.everything()
    await samples.intake.cancel(A, request)
    assert samples.log.everything() == before
    assert samples.result(request) == RESULT


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_nobody_cancels_what_is_not_theirs(samples: Samples, is_claimed: bool) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    if is_claimed:
        samples.claim()
    before = samples.log.everything()
    await samples.intake.cancel(B, request)
    for unknown in ("", ":", "x:sample:0:0", "\ud800:sample:0:0", f"{request}0"):
        await samples.intake.cancel(A, RequestId(unknown))
    assert samples.log.everything() == before


async def test_a_cancel_between_two_lives_of_a_worker_is_kept(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1, 2)
    samples.claim()
    await samples.intake.cancel(A, requests[1])
    reborn = samples.new_worker()
    assert reborn.requeue() == 2
    assert samples.result(requests[1]) == CANCELLED
    assert [claimed.request for claimed in reborn.claim(9)] == [requests[0], requests[2]]
    assert reborn.cancelled() == []


async def test_a_request_and_its_cancel_wake_the_worker(samples: Samples) -> None:
    listener = samples.log.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(redis_keys.notify_worker(POOL, WORKER))
    assert listener.get_message(timeout=120) is None  # the subscription itself
    (request,) = await samples.submit(await samples.sampler(), 0)
    assert listener.get_message(timeout=120)["data"] == b"sample"
    samples.claim()
    await samples.intake.cancel(A, request)
    assert listener.get_message(timeout=120)["data"] == request.encode()
    listener.close()
