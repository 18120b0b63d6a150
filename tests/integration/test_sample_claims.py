"""Claims of sample requests: worker, order, and exactly one result."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cotrain_store import redis_keys
from cotrain_store.bodies.sample_body import TargetTokens
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import RequestId, WorkerId
from cotrain_store.messages.ops import Result, ResultKind
from tests.support.full_table import no_descriptor
from tests.support.lives import life_ms
from tests.support.log import WORKER
from tests.support.samples import BODY, LARGE_BODY, RESULT, Samples, count_waiting, sampler_record
from tests.support.stack import POOL

OTHER_WORKER = WorkerId("w1")


def counted(samples: Samples) -> dict[str, float]:
    rows = samples.log.redis.hgetall(redis_keys.counters(POOL))
    return {name.decode(): float(value) for name, value in rows.items()}


async def test_a_claim_gives_what_was_asked(samples: Samples) -> None:
    sampler = await samples.sampler()
    small = await samples.intake.submit(sampler, 0, BODY)
    large = await samples.intake.submit(sampler, 179788117000000000, LARGE_BODY)
    first, second = samples.sampling.claim(9)
    assert (first.request, first.body, second.request, second.body) == (small, BODY, large, LARGE_BODY)
    assert (first.tenant, first.sampler, first.weights) == (sampler.tenant, sampler.id, None)
    assert (first.starts, first.deaths) == (0, 0)
    assert samples.load()[:2] == (0, 2)
    assert samples.claim() == []


async def test_a_body_that_cannot_be_read_now_is_claimed_again(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await samples.sampler()
    requests = await samples.submit(sampler, 0)
    requests.append(await samples.intake.submit(sampler, 1, LARGE_BODY))
    with monkeypatch.context() as short:
        short.setattr("pathlib.Path.open", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            samples.claim()
    claimed = samples.sampling.claim(9)
    assert [one.request for one in claimed] == requests
    assert [one.body for one in claimed] == [BODY, LARGE_BODY]
    assert samples.claim() == []


async def test_a_claim_takes_no_more_than_asked_for(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), *range(5))
    assert count_waiting(samples.log.redis, POOL) == 5
    assert samples.claim(0) == []
    assert samples.claim(2) + samples.claim(9) == requests
    assert count_waiting(samples.log.redis, POOL) == 0


async def test_a_claim_whose_answer_was_lost_is_not_lost(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection repeats the claim itself, or its caller does after an error."""
    requests = await samples.submit(await samples.sampler(), *range(6))
    claim = samples.sampling._claim

    def repeated(*script: Any) -> Any:
        claim(*script)
        return claim(*script)

    def broken(*script: Any) -> Any:
        claim(*script)
        raise RedisConnectionError

    monkeypatch.setattr(samples.sampling, "_claim", repeated)
    assert samples.claim(2) == requests[:2]
    monkeypatch.setattr(samples.sampling, "_claim", broken)
    with pytest.raises(RedisConnectionError):
        samples.claim(2)
    monkeypatch.setattr(samples.sampling, "_claim", claim)
    assert samples.claim(1) == requests[2:4]
    assert samples.claim(9) == requests[4:]


async def test_what_was_given_back_after_a_lost_answer_is_claimed_anew(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1)
    claim = samples.sampling._claim

    def broken(*script: Any) -> Any:
        claim(*script)
        raise RedisConnectionError

    monkeypatch.setattr(samples.sampling, "_claim", broken)
    with pytest.raises(RedisConnectionError):
        samples.claim(1)
    monkeypatch.setattr(samples.sampling, "_claim", claim)
    assert samples.sampling.give_back() == 1
    assert samples.claim(9) == requests
    assert samples.load()[:2] == (0, 2)


async def test_tenants_take_turns_whatever_one_of_them_sends(samples: Samples) -> None:
    await samples.submit(await samples.sampler("flood"), *range(1_000))
    for tenant in ("b", "c"):
        await samples.submit(await samples.sampler(tenant), *range(20))
    owners = [samples.sampling.claim(1)[0].tenant for _ in range(60)]
    assert owners == ["flood", "b", "c"] * 20
    assert {claimed.tenant for claimed in samples.sampling.claim(50)} == {"flood"}


async def test_one_large_claim_is_as_fair_as_many_small_ones(samples: Samples) -> None:
    for tenant in ("a", "b"):
        await samples.submit(await samples.sampler(tenant), *range(10))
    owners = [claimed.tenant for claimed in samples.sampling.claim(20)]
    assert all(first != second for first, second in pairwise(owners))


async def test_weights_that_are_not_stored_are_sampled_by_the_worker_that_has_them(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=0)
    fresh = await samples.records.sampler(run.tenant, sampler_record().id)
    base = await samples.sampler(number=1)
    other = samples.new_worker(OTHER_WORKER)
    samples.beat(WORKER)
    (of_base,) = await samples.submit(base, 0)
    of_fresh = await samples.submit(fresh, 0, 1)
    assert [claimed.request for claimed in other.claim(9)] == [of_base]
    (again,) = await samples.submit(base, 1)
    first, *rest = samples.sampling.claim(9)
    assert first.weights == fresh.weights
    assert [first.request, *(claimed.request for claimed in rest)] == [*of_fresh, again]

    assert fresh.weights
    assert samples.saved.mark_stored(fresh.weights, "d" * 64, 10)
    (stored,) = await samples.submit(fresh, 2)
    assert [claimed.request for claimed in other.claim(9)] == [stored]


async def test_a_turn_is_not_lost_while_only_another_worker_could_take_it(samples: Samples) -> None:
    run = await samples.log.new_run("a")
    await samples.save(run, 1, sampler=0)
    fresh = await samples.records.sampler(run.tenant, sampler_record("a").id)
    (of_a,) = await samples.submit(fresh, 0)
    of_b = await samples.submit(await samples.sampler("b"), 0, 1)
    other = samples.new_worker(OTHER_WORKER)
    samples.beat(WORKER)
    assert [claimed.request for claimed in other.claim(1)] == of_b[:1]
    assert samples.claim() == [of_a, of_b[1]]


async def test_what_waits_for_a_worker_that_is_gone_runs_elsewhere_once_it_can(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, sampler=0)
    fresh = await samples.records.sampler(run.tenant, sampler_record().id)
    requests = await samples.submit(fresh, 0, 1)
    other = samples.new_worker(OTHER_WORKER)
    assert other.claim(9) == []  # its weights are in the memory of w0, or in the log
    assert fresh.weights
    samples.saved.mark_stored(fresh.weights, "d" * 64, 10)
    samples.beat(WORKER)
    assert other.claim(9) == []  # w0 lives: it will come to it
    samples.log.redis.delete(redis_keys.worker(POOL, WORKER))
    assert [claimed.request for claimed in other.claim(9)] == requests


async def test_a_result_frees_all_that_its_request_held(samples: Samples) -> None:
    before = set(samples.log.everything())
    request = await samples.intake.submit(await samples.sampler(), 0, LARGE_BODY)
    samples.claim()
    samples.resolve(request)
    left = set(samples.log.everything()) - before
    assert samples.result(request) == RESULT
    assert (samples.load(), samples.log.references()) == ((0, 0, 0), {})
    record = samples.log.redis.hgetall(redis_keys.sample(request))
    assert set(record) == {b"state", b"tenant", b"digest", b"failed", b"size"}
    named = (f"cotrain:sampler:{sampler_record().id}", redis_keys.result(request), redis_keys.sample(request))
    assert left >= {name.encode() for name in named}
    assert not {name for name in left if b"waiting" in name or b"claimed" in name}
    assert counted(samples) == {"sample_requests": 1}


async def test_the_first_result_wins(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1)
    samples.claim()
    samples.resolve(requests[0])
    before = samples.log.everything()
    samples.sampling.resolve({requests[0]: Result.failed("late", "server")}, {"sample_requests": 1})
    samples.sampling.resolve({RequestId("nobody:sample:0:0"): RESULT}, {})
    assert samples.log.everything() == before
    samples.resolve(*requests)  # of two, the one that is not done
    assert samples.load() == (0, 0, 0)


async def test_a_replaced_worker_writes_nothing(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1)
    samples.claim(1)
    reborn = samples.new_worker()
    before = samples.log.everything()
    for write in (
        lambda: samples.resolve(requests[0]),
        lambda: samples.sampling.claim(1),
        lambda: samples.sampling.requeue(),
        lambda: samples.sampling.give_back(),
    ):
        with pytest.raises(Fenced):
            write()
    assert samples.log.everything() == before
    assert reborn.requeue() == 1


async def test_what_a_dead_worker_ran_comes_back_first_and_in_order(samples: Samples) -> None:
    a = await samples.submit(await samples.sampler("a"), *range(4))
    b = await samples.submit(await samples.sampler("b"), *range(2))
    assert samples.claim(4) == [a[0], b[0], a[1], b[1]]
    reborn = samples.new_worker()
    assert reborn.requeue() == 4
    assert (samples.load("a")[:2], samples.load("b")[:2]) == ((4, 0), (2, 0))
    claimed = reborn.claim(9)
    assert [one.request for one in claimed if one.tenant == "a"] == a
    assert [one.request for one in claimed if one.tenant == "b"] == b
    assert [one.starts for one in claimed if one.tenant == "a"] == [1, 1, 0, 0]
    assert reborn.requeue() == 6


async def test_what_a_leaving_worker_gives_back_counts_no_death(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1)
    samples.claim()
    samples.sampling.risk(requests[0])
    assert samples.sampling.give_back() == 2
    again = samples.sampling.claim(9)
    assert [one.request for one in again] == requests
    assert [(one.starts, one.deaths) for one in again] == [(0, 0), (0, 0)]


async def test_a_request_that_kills_its_worker_alone_is_known(samples: Samples) -> None:
    (request,) = await samples.submit(await samples.sampler(), 0)
    samples.claim()
    samples.sampling.risk(request)
    reborn = samples.new_worker()
    reborn.requeue()
    (again,) = reborn.claim(1)
    assert (again.starts, again.deaths) == (1, 1)


async def test_a_body_that_is_gone_or_broken_is_none(samples: Samples) -> None:
    sampler = await samples.sampler()
    large = await samples.intake.submit(sampler, 0, LARGE_BODY)
    small = await samples.intake.submit(sampler, 1, BODY)
    for path in samples.log.spool.folder.iterdir():
        path.write_bytes(b"")
    samples.log.redis.hset(redis_keys.sample(small), "body", "nonsense")
    bodies = {claimed.request: claimed.body for claimed in samples.sampling.claim(9)}
    assert bodies == {large: None, small: None}


async def test_a_large_result_goes_to_disk_and_lives_shorter(samples: Samples) -> None:
    requests = await samples.submit(await samples.sampler(), 0, 1)
    samples.claim()
    large = Result(ResultKind.SAMPLE, b"x" * (INLINE_LIMIT_BYTES + 1))
    samples.sampling.resolve({requests[0]: large, requests[1]: RESULT}, {})
    stored = samples.result(requests[0])
    assert stored
    assert stored.kind is ResultKind.SPOOLED_SAMPLE
    assert samples.log.results.read(stored.payload.decode()) == large.payload
    lives = [life_ms(samples.log.redis, redis_keys.result(request)) for request in requests]
    assert lives[0] == pytest.approx(2 * 3600e3, abs=60e3)
    assert lives[1] == pytest.approx(24 * 3600e3, abs=60e3)


async def test_each_body_is_read_as_it_was_sent(samples: Samples) -> None:
    sampler = await samples.sampler()
    bodies = [
        replace(BODY, stop=(), seed=None, max_tokens=None),
        replace(BODY, stop=("\n\n", "ü"), target_prompt_logprobs=TargetTokens.of(((1, 2), (3, -1)))),
        replace(BODY, stop=(2, 3), prompt=(1,), target_prompt_logprobs=TargetTokens.of(())),
    ]
    for seq, body in enumerate(bodies):
        await samples.intake.submit(sampler, seq, body)
    assert [claimed.body for claimed in samples.sampling.claim(9)] == bodies
