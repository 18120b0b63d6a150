"""One poll for many requests: each end is told until its client says that it knows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cotrain_store.keys import result_keys, run_keys
from cotrain_store.messages.ids import CLONE_SIZE, OWN_SEQS, RequestId, sample_id
from cotrain_store.messages.results import Result
from cotrain_store.sampling.completions import Completion, Completions
from tests.support.lives import life_ms, pass_time
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import RESULT, Samples, open_samples
from tests.support.waiting import until

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
    samples.log.redis.set(result_keys.clock(), 1_000_000)
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
    monkeypatch.setattr("cotrain_store.sampling.completions.LIMITS", 3)
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
    assert told == [run_keys.completions(sampler.id, (OWN_SEQS - 1) // CLONE_SIZE).encode()]


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
    monkeypatch.setattr("cotrain_store.sampling.completions.HOLD_S", 0.02)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        assert await completions.wait(sampler, 0, 0, None) == ([], 0)


async def test_the_sweep_finds_what_no_message_told(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.sampling.completions.SWEEP_S", 0.02)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        samples.log.redis.zadd(run_keys.completions(sampler.id, 0), {"3": 1})
        assert await poll == ([Completion(sample_id(sampler.id, 3), failed=False, size=0)], 1)


async def test_a_new_subscription_looks_for_what_was_told_while_there_was_none(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.sampling.completions.SWEEP_S", NEVER_S)
    sampler = await samples.sampler()
    async with samples.completions() as completions:
        poll = asyncio.create_task(completions.wait(sampler, 0, 0, PATIENCE_S))
        await somebody_waits(completions)
        with samples.log.redis.pipeline(transaction=True) as at_once:
            at_once.execute_command("CLIENT KILL TYPE pubsub")
            at_once.zadd(run_keys.completions(sampler.id, 0), {"3": 1})
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
    name = run_keys.completions(sampler.id, 0)
    assert life_ms(samples.log.redis, name) == pytest.approx(24 * 3600e3, abs=60e3)
    pass_time(samples.log.redis, run_keys.COMPLETION_TTL_MS + 1_000)
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
    lives = [life_ms(samples.log.redis, result_keys.result(r)) for r in (requests[0], requests[1], foreign)]
    assert 0 < lives[0] <= result_keys.READ_RESULT_TTL_MS
    assert min(lives[1:]) > result_keys.READ_RESULT_TTL_MS
    assert life_ms(samples.log.redis, run_keys.sample(requests[0])) > lives[0]
    assert life_ms(samples.log.redis, run_keys.sample(requests[2])) == -1  # still waiting
    samples.resolve(requests[2])
    assert samples.result(requests[2]) == RESULT
