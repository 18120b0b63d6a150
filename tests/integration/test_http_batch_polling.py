"""retrieve_futures over HTTP and a real Redis: one poll that waits for all samples of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cotrain.wire.sampling import MAX_RETRIEVED
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.runs import Role
from cotrain_store.redis_client.connection import clock_ms
from tests.support.http_api import ALICE, BOB, SOON_S, Api, running_api, sample_body
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import StandIn

CLONE = 10**9


@pytest.fixture
async def api(empty_redis: EmbeddedRedis) -> AsyncIterator[Api]:
    async with running_api(empty_redis.url, long_poll_s=40) as api:
        yield api


@pytest.fixture
async def sampler(api: Api) -> str:
    return await api.new_sampler()


async def poll(api: Api, sampler: str, cursor: int = 0, clone: int = 0, key: str = ALICE, **fields: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **fields}
    return await api.post("retrieve_futures", body, key)


def ended(answer: Any) -> list[str]:
    return [completion["request_id"] for completion in answer.json()["completions"]]


async def sample(api: Api, worker: StandIn, sampler: str, *seqs: int) -> None:
    """Submit and claim these requests."""
    for seq in seqs:
        assert (await api.post("asample", sample_body(sampler, seq))).status_code == 200
    worker.claim()


async def test_a_held_poll_is_answered_as_soon_as_one_request_has_ended(
    api: Api, worker: StandIn, sampler: str
) -> None:
    await sample(api, worker, sampler, 0, 1)
    held = asyncio.create_task(poll(api, sampler))
    await api.until_batch_held(held)
    worker.finish(RequestId(f"{sampler}:1"), [1, 2])
    answer = (await held).json()
    assert [completion["request_id"] for completion in answer["completions"]] == [f"{sampler}:1"]
    assert answer["completions"][0]["state"] == "finished"
    assert answer["completions"][0]["response_payload_uncompressed_size"] > 0


async def test_a_failed_request_is_told_and_its_failure_fetched_as_ever(
    api: Api, worker: StandIn, sampler: str
) -> None:
    await sample(api, worker, sampler, 0)
    worker.fail(RequestId(f"{sampler}:0"))
    answer = await poll(api, sampler)
    failed = {"state": "failed", "request_id": f"{sampler}:0"}
    assert answer.json()["completions"] == [failed]
    future = {"request_id": f"{sampler}:0"}
    assert (await api.post("retrieve_future", future)).json()["category"] == "user"


async def ends_in_ms(api: Api, request: str) -> float:
    redis = api.services.connection
    ends: float = await redis.zscore(redis_keys.ends(), redis_keys.result(RequestId(request)))
    return ends - await clock_ms(redis)


async def test_very_many_results_may_be_acknowledged_at_once(api: Api, sampler: str) -> None:
    ids = [f"{sampler}:{CLONE * CLONE + number}" for number in range(MAX_RETRIEVED)]
    answer = await poll(api, sampler, timeout=0.0, retrieved_request_ids=ids)
    assert answer.status_code == 200


async def test_nobody_acknowledges_what_is_anothers(api: Api, worker: StandIn, sampler: str) -> None:
    bobs = await api.new_sampler(BOB)
    await api.post("asample", sample_body(bobs, 0), BOB)
    worker.claim()
    worker.finish(RequestId(f"{bobs}:0"), [1])
    await poll(api, sampler, timeout=0.0, retrieved_request_ids=[f"{bobs}:0", "x"])
    left_ms = await ends_in_ms(api, f"{bobs}:0")
    assert left_ms > redis_keys.READ_RESULT_TTL_MS


async def other_key(api: Api, role: Role) -> str:
    """Make another key of Alice's tenant."""
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    return await api.services.tenants.issue("other", tenant=tenant, role=role)


@pytest.mark.parametrize("role", ["viewer", "member"])
async def test_another_key_of_the_tenant_takes_no_end_and_no_result_away(
    api: Api, worker: StandIn, sampler: str, role: Role
) -> None:
    key = await other_key(api, role)
    await sample(api, worker, sampler, 0, 1)
    worker.finish(RequestId(f"{sampler}:0"), [1])
    held = asyncio.create_task(poll(api, sampler, cursor=(await poll(api, sampler)).json()["cursor"]))
    await api.until_batch_held(held)
    worker.finish(RequestId(f"{sampler}:1"), [2])
    told = (await held).json()
    everything = [f"{sampler}:0", f"{sampler}:1"]
    for cursor in (told["cursor"], 2**53, 2**63 - 1):  # one that another was given, and ones that nobody was
        hostile = await poll(api, sampler, cursor, timeout=0.0, retrieved_request_ids=everything, key=key)
        assert ended(hostile) == []
    assert ended(await poll(api, sampler, timeout=0.0, key=key)) == everything
    fetched = await api.post("retrieve_future", {"request_id": everything[0]}, key)
    assert fetched.status_code == 200
    assert ended(await poll(api, sampler, timeout=0.0)) == everything
    assert await ends_in_ms(api, everything[0]) > redis_keys.READ_RESULT_TTL_MS


async def test_a_cursor_beyond_what_was_told_takes_nothing_away(api: Api, worker: StandIn, sampler: str) -> None:
    await sample(api, worker, sampler, 0)
    worker.finish(RequestId(f"{sampler}:0"), [1])
    assert ended(await poll(api, sampler, 2**53, timeout=0.0)) == []
    assert ended(await poll(api, sampler, timeout=0.0)) == [f"{sampler}:0"]


async def test_an_end_whose_result_has_arrived_is_told_no_more(api: Api, worker: StandIn, sampler: str) -> None:
    seqs = (0, 1, 7 * CLONE, 7 * CLONE + 1)
    await sample(api, worker, sampler, *seqs)
    for seq in seqs:
        worker.finish(RequestId(f"{sampler}:{seq}"), [1])
    read = [f"{sampler}:0", f"{sampler}:{7 * CLONE}"]
    assert ended(await poll(api, sampler, retrieved_request_ids=read)) == [f"{sampler}:1"]
    assert ended(await poll(api, sampler, clone=7)) == [f"{sampler}:{7 * CLONE + 1}"]


async def test_a_batch_poll_counts_as_a_poll_of_its_tenant(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, long_poll_s=40, quotas={"polls": 1}) as api:
        sampler = await api.new_sampler()
        held = asyncio.create_task(poll(api, sampler))
        await api.until_batch_held(held)
        second = await poll(api, sampler)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        api.services.drain()
        assert (await held).status_code == 200


async def test_draining_answers_a_held_batch_poll_with_what_there_is(api: Api, sampler: str) -> None:
    held = asyncio.create_task(poll(api, sampler, cursor=0))
    await api.until_batch_held(held)
    api.services.drain()
    async with asyncio.timeout(SOON_S):
        assert (await held).json() == {"completions": [], "cursor": 0}


async def test_a_client_that_hangs_up_frees_its_batch_poll(api: Api, sampler: str) -> None:
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    held, hung_up = api.start_post("retrieve_futures", {"target": target})
    await api.until_batch_held(held)
    hung_up.set()
    async with asyncio.timeout(SOON_S):
        await held
    assert not api.services.polls_by_tenant.total()
