"""Samplers: requests, results, expired ones, and polls for all of them."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any

import httpx
import pytest

from cotrain import (
    APIStatusError,
    ModelInput,
    RequestFailed,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    UnprocessableEntityError,
    UnsupportedInput,
)
from cotrain.clients.sampling import Completions, _clone
from cotrain.requests.connection import POSTS_AT_ONCE
from cotrain.settings import ClientSettings
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy
from cotrain.types import SamplingSessionTarget
from tests.support.fake_api import Answer, FakeApi, refusal
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until

PROMPT = ModelInput.from_ints([7, 8, 9])
THREE = SamplingParams(max_tokens=3)


@pytest.fixture(params=[False, True], ids=["poll_each", "poll_all"])
def api(request: pytest.FixtureRequest) -> FakeSampling:
    return FakeSampling(batches=request.param)


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="m")


def test_a_sample_has_tokens_logprobs_and_ids(sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 2, THREE).result()
    assert [sequence.tokens for sequence in response.sequences] == [[9, 9, 9], [9, 9, 9]]
    assert [sequence.logprobs for sequence in response.sequences] == [[-0.5] * 3, [-1.5] * 3]
    assert [s.sequence_id for s in response.sequences] == ["s1:sample:0:0/0", "s1:sample:0:0/1"]
    assert response.prompt_cache_hit_tokens == 2
    assert response.prompt_logprobs is None


@pytest.mark.parametrize("prompt", [[7, 8, 9], "text"])
def test_an_invalid_prompt_raises_with_how_to_make_one(sampler: SamplingClient, prompt: Any) -> None:
    with pytest.raises(UnsupportedInput, match=r"ModelInput\.from_ints"):
        sampler.sample(prompt, 1, THREE)


def test_every_parameter_is_sent_unchanged(api: FakeSampling, sampler: SamplingClient) -> None:
    params = SamplingParams(max_tokens=5, seed=3, stop=["\n"], temperature=0, top_k=4, top_p=0.5)
    sampler.sample(PROMPT, 2, params, True, 3, 4, prompt_logprobs_last_n=2).result()
    sent = api.bodies("asample")[0]
    assert sent["sampling_params"] == params.model_dump()
    asked = {name: sent[name] for name in sent if "logprobs" in name}
    assert asked == {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 4,
        "prompt_logprobs_last_n": 2,
    }


def test_requests_of_one_sampler_are_numbered_from_0(api: FakeSampling, sampler: SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, THREE) for _ in range(20)]
    for future in futures:
        future.result()
    assert sorted(body["seq_id"] for body in api.samples.values()) == list(range(20))


def test_logprobs_of_a_prompt_start_with_none(api: FakeSampling, sampler: SamplingClient) -> None:
    assert sampler.compute_logprobs(PROMPT).result() == [None, -1.0, -1.0]
    assert sampler.compute_logprobs_async(PROMPT, 1).result() == [None, -1.0, -1.0]
    sent = api.bodies("asample")
    assert [body["sampling_params"]["max_tokens"] for body in sent] == [1, 1]
    assert [body.get("prompt_logprobs_last_n") for body in sent] == [None, 1]


def test_later_changes_of_the_arguments_have_no_effect(sampler: SamplingClient) -> None:
    prompt = ModelInput.from_ints([1, 2])
    future = sampler.sample(prompt, 1, THREE)
    prompt.chunks.clear()
    assert future.result().sequences[0].tokens == [2, 2, 2]


def test_samplers_of_one_session_never_share_a_number(api: FakeSampling, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    first = service.create_sampling_client(base_model="m")
    second = run.save_weights_and_get_sampling_client()
    third = run.create_sampling_client("tinker://s1:train:0/sampler_weights/a")
    assert [each.sampler_id for each in (first, second, third)] == [f"s1:sample:{n}" for n in range(3)]


def test_a_sampler_has_the_name_of_its_base_model(api: FakeSampling, service: ServiceClient) -> None:
    named = service.create_sampling_client("tinker://s1:train:0/sampler_weights/a")
    plain = service.create_sampling_client(base_model="other")
    assert (named.get_base_model(), plain.get_base_model()) == ("m", "other")
    assert sum(path.startswith("samplers/") for path in api.paths()) == 1


def test_a_request_to_a_busy_server_is_retried_with_the_same_number(api: FakeSampling, sampler: SamplingClient) -> None:
    api.answers["asample"] = [refusal(429, "full", **{"Retry-After": "0.01"}) for _ in range(3)]
    sampler.sample(PROMPT, 1, THREE).result()
    assert [body["seq_id"] for body in api.bodies("asample")] == [0, 0, 0, 0]


def sample_all(api: FakeSampling, count: int, policy: RetryPolicy) -> None:
    """Send samples concurrently, and wait for their results."""
    with ServiceClient("http://server", "k", network=api.network, policy=policy) as service:
        sampler = service.create_sampling_client(base_model="m")
        for future in [sampler.sample(PROMPT, 1, THREE) for _ in range(count)]:
            future.result()


@pytest.mark.parametrize(("limit", "at_once"), [(2, 2), (1_000, POSTS_AT_ONCE)])
def test_a_busy_server_is_polled_by_few_callers_while_others_wait(api: FakeSampling, limit: int, at_once: int) -> None:
    many = 3 * at_once
    api.answers["client/config"] = [httpx.Response(200, json={"sample_max_concurrent_requests": limit})]
    api.answers["asample"] = [refusal(429) for _ in range(many)]
    # Long enough for all to be sent before the first refusals are answered.
    sample_all(api, many, RetryPolicy(first_delay_s=0.02, longest_delay_s=0.02))
    refused = {body["seq_id"] for body in api.bodies("asample")[:many]}
    assert len(refused) == at_once
    assert len(api.samples) == many


def test_a_busy_server_is_no_error_after_the_time_limit(api: FakeSampling) -> None:
    api.answers["asample"] = [refusal(429) for _ in range(5)]
    sample_all(api, 1, RetryPolicy(give_up_after_s=-1))
    assert len(api.samples) == 1


def test_a_refusal_is_final(api: FakeSampling, sampler: SamplingClient) -> None:
    api.answers["asample"] = [refusal(422, "no such field")]
    with pytest.raises(UnprocessableEntityError, match="no such field"):
        sampler.sample(PROMPT, 1, THREE).result()


@pytest.mark.parametrize("answer", [refusal(404), httpx.ConnectError("away")])
def test_a_cancellation_that_does_not_reach_the_server_is_dropped(
    api: FakeSampling, sampler: SamplingClient, answer: Answer
) -> None:
    api.answers["cancel_future"] = [answer]
    api.hold["s1:sample:0:0"] = threading.Event()
    future = sampler.sample(PROMPT, 1, THREE)
    asyncio.run(future.accepted_async())
    assert future.cancel()
    asyncio.run(until(lambda: "cancel_future" in api.paths()))
    assert sampler.sample(PROMPT, 1, THREE).result().sequences
    assert api.paths().count("cancel_future") == 1


def test_a_pending_result_is_polled_until_it_is_available(api: FakeSampling, sampler: SamplingClient) -> None:
    gate = api.hold["s1:sample:0:0"] = threading.Event()
    future = sampler.sample(PROMPT, 1, THREE)
    asyncio.run(until(lambda: sum(path.startswith("retrieve_future") for path in api.paths()) >= 3))
    gate.set()
    assert future.result().sequences[0].tokens == [9, 9, 9]


def test_a_lost_result_is_sampled_again(api: FakeSampling, sampler: SamplingClient) -> None:
    api.answers["retrieve_future"] = [refusal(410, "expired")]
    assert sampler.sample(PROMPT, 1, THREE).result().sequences[0].sequence_id == "s1:sample:0:1/0"
    assert [body["seq_id"] for body in api.bodies("asample")] == [0, 1]


def test_a_repeatedly_lost_result_is_an_error(api: FakeSampling, sampler: SamplingClient) -> None:
    api.answers["retrieve_future"] = [refusal(410, "expired")] * 5
    with pytest.raises(APIStatusError, match="expired"):
        sampler.sample(PROMPT, 1, THREE).result()
    assert len(api.samples) == 5


def test_a_failed_sample_raises_with_the_reason(api: FakeSampling, sampler: SamplingClient) -> None:
    failed = {"error": "Too long.", "category": "user"}
    api.answers["retrieve_future"] = [httpx.Response(200, json=failed)]
    with pytest.raises(RequestFailed, match="Too long") as caught:
        sampler.sample(PROMPT, 1, THREE).result()
    assert caught.value.category == "user"


def test_cancelling_a_future_cancels_the_sample(api: FakeSampling, sampler: SamplingClient) -> None:
    gate = api.hold["s1:sample:0:0"] = threading.Event()
    future = sampler.sample(PROMPT, 1, THREE)
    asyncio.run(future.accepted_async())
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    asyncio.run(until(lambda: api.cancelled == ["s1:sample:0:0"]))
    gate.set()
    assert sampler.sample(PROMPT, 1, THREE).result().sequences


def test_cancelling_the_last_task_that_awaits_a_sample_cancels_it(api: FakeSampling, sampler: SamplingClient) -> None:
    api.hold["s1:sample:0:0"] = threading.Event()

    async def give_up() -> None:
        future = await sampler.sample_async(PROMPT, 1, THREE)
        other = asyncio.ensure_future(future)
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        assert not task.done()
        await until(lambda: "s1:sample:0:0" in api.samples)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: api.cancelled == ["s1:sample:0:0"])

    asyncio.run(give_up())


def test_a_sample_continues_after_the_timeout_of_its_caller(api: FakeSampling, sampler: SamplingClient) -> None:
    gate = api.hold["s1:sample:0:0"] = threading.Event()
    future = sampler.sample_async(PROMPT, 1, THREE)
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(timeout=0.01))
    gate.set()
    assert future.result().sequences
    assert not api.cancelled


def test_one_prompt_is_a_sufficient_argument(api: FakeSampling, sampler: SamplingClient) -> None:
    assert len(sampler.sample(PROMPT).result().sequences) == 1
    assert asyncio.run(sampler.sample_async(prompt=PROMPT)).result().sequences
    assert api.bodies("asample")[0]["sampling_params"] == SamplingParams().model_dump(exclude_none=True)


def test_a_finished_result_cannot_be_cancelled(api: FakeSampling, sampler: SamplingClient) -> None:
    future = sampler.sample(PROMPT, 1, THREE)
    future.result()
    assert not future.cancel()
    assert future.result().sequences
    assert not api.cancelled


def test_a_pickled_client_uses_the_same_sampler_with_its_own_numbers(
    sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection: Any = sampler._connection
    shared: list[ClientSettings] = []

    def share(settings: ClientSettings) -> Any:
        shared.append(settings)
        return connection

    monkeypatch.setattr("cotrain.clients.sampling.shared_connection", share)
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]
    api_ids = [clone.sample(PROMPT, 1, THREE).result().sequences[0].sequence_id for clone in clones]
    seq_ids = [int(each.rsplit(":", 1)[1].partition("/")[0]) for each in api_ids]
    assert all(seq_id % 10**9 == 0 and seq_id > 0 for seq_id in seq_ids)
    assert len(set(seq_ids)) == 3
    assert {clone.sampler_id for clone in clones} == {sampler.sampler_id}
    assert shared == [ClientSettings("http://server", "tml-key")] * 3


def test_clones_of_one_process_share_a_connection() -> None:
    settings = ClientSettings("http://127.0.0.1:9", "tml-key")
    first, second = (_clone(settings, "s", "m", False) for _ in range(2))
    assert first._connection is second._connection
    first._connection.loop.close(first._connection.transport.close)


TARGET = SamplingSessionTarget(sampling_session_id="s", cloned_sampler_id=3)


def ended(cursor: int, *request_ids: str) -> httpx.Response:
    completions = [{"state": "finished", "request_id": each} for each in request_ids]
    return httpx.Response(200, json={"completions": completions, "cursor": cursor})


def poll(
    work: Callable[[Completions], Awaitable[Any]], *answers: Answer, policy: RetryPolicy | None = None
) -> list[dict[str, Any]]:
    """Run `work` while the server returns these answers. Return the request bodies that it received."""
    api = FakeApi(answers={"retrieve_futures": list(answers)})

    async def at_once(_: float) -> None:
        return None

    async def run() -> None:
        transport = Transport("http://server", "k", network=api.network, policy=policy, sleep=at_once)
        completions = Completions(transport, TARGET)
        await work(completions)
        if completions.task is not None:
            await completions.task
        await transport.close()

    asyncio.run(run())
    return api.bodies("retrieve_futures")


def test_one_poll_serves_every_waiting_caller() -> None:
    async def wait_for_three(completions: Completions) -> None:
        await asyncio.gather(*(completions.wait_until_ended(each) for each in "abc"))

    asked = poll(wait_for_three, ended(2, "b", "a"), ended(3, "c"))
    assert [body["prev_cursor"] for body in asked] == [0, 2]
    assert asked[0]["target"] == TARGET.model_dump()
    assert "timeout" not in asked[0]


def test_a_result_that_arrives_before_its_caller_is_kept() -> None:
    async def wait_late(completions: Completions) -> None:
        await completions.wait_until_ended("late")
        await completions.wait_until_ended("early")

    assert len(poll(wait_late, ended(2, "early", "late"))) == 1


def test_a_received_result_is_acknowledged_until_the_server_answers() -> None:
    async def wait_and_acknowledge(completions: Completions) -> None:
        await completions.wait_until_ended("a")
        completions.acknowledge("a")

    asked = poll(wait_and_acknowledge, ended(1, "a"), refusal(503), ended(1))
    assert [body["retrieved_request_ids"] for body in asked] == [[], ["a"], ["a"]]
    # No caller is waiting, so the server need not wait for results either.
    assert [body.get("timeout") for body in asked] == [None, 0.0, 0.0]


def test_a_result_that_arrives_during_a_poll_is_acknowledged_in_the_next() -> None:
    acknowledged: list[list[str]] = []

    async def run() -> None:
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            acknowledged.append(json.loads(request.content)["retrieved_request_ids"])
            is_asked.set()
            await may_answer.wait()
            return ended(0)

        transport = Transport("http://server", "k", network=httpx.MockTransport(answer))
        completions = Completions(transport, TARGET)
        completions.acknowledge("a")
        await is_asked.wait()
        completions.acknowledge("b")
        may_answer.set()
        assert completions.task is not None
        await completions.task
        await transport.close()

    asyncio.run(run())
    assert acknowledged == [["a"], ["b"]]


def test_no_poll_is_sent_without_waiters_and_acknowledgements() -> None:
    async def one_after_another(completions: Completions) -> None:
        await completions.wait_until_ended("a")
        assert completions.task is None
        await completions.wait_until_ended("b")

    assert len(poll(one_after_another, ended(1, "a"), ended(2, "b"))) == 2


@pytest.mark.parametrize("answer", [refusal(429), refusal(500), httpx.ReadError("cut")])
def test_a_transient_error_is_retried(answer: Answer) -> None:
    asked = poll(lambda completions: completions.wait_until_ended("a"), answer, ended(1, "a"))
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "policy"),
    [
        (refusal(404), None),
        (refusal(500), RetryPolicy(give_up_after_s=-1)),
        (httpx.Response(200, json={"completions": "none"}), None),
    ],
)
def test_without_batch_polling_each_future_is_polled_alone(answer: Answer, policy: RetryPolicy | None) -> None:
    async def wait_twice(completions: Completions) -> None:
        await asyncio.gather(completions.wait_until_ended("a"), completions.wait_until_ended("b"))
        completions.acknowledge("a")
        await completions.wait_until_ended("c")

    assert len(poll(wait_twice, answer, policy=policy)) == 1
