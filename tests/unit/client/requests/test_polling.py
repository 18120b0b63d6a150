"""Polling of results: retries, failures, and limits of a busy server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from cotrain import ModelInput, SamplingParams, ServiceClient, UnprocessableEntityError
from cotrain.errors import APIConnectionError, CheckpointNotFound, MalformedMessage, NotFoundError, RequestFailed
from cotrain.requests.connection import NOT_FOUND, POSTS_AT_ONCE, SampleRequests, wait_for_json, wait_for_pass
from cotrain.transport import responses as patience
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy
from cotrain.types import SampleRequest
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import OptimStepResponse
from cotrain_store.errors import Reason
from tests.support.fake_api import Answer, FakeApi, pending, protobuf, refusal
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until


async def wait_for_step(transport: Transport, request_id: str) -> OptimStepResponse:
    return await wait_for_json(transport, request_id, OptimStepResponse)


def poll(
    waiting: Callable[[Transport, str], Awaitable[Any]], *answers: Answer, policy: RetryPolicy | None = None
) -> tuple[Any, FakeApi]:
    api = FakeApi(answers={"retrieve_future": list(answers)})

    async def at_once(_: float) -> None:
        return None

    async def run() -> Any:
        transport = Transport("http://server", "k", network=api.network, policy=policy, sleep=at_once)
        try:
            return await waiting(transport, "r")
        finally:
            await transport.close()

    return asyncio.run(run()), api


DONE = httpx.Response(200, json={"metrics": {"grad_norm": 2.0}})


def test_a_pending_result_is_polled_again() -> None:
    result, api = poll(wait_for_step, pending("r"), pending("r"), DONE)
    assert result.metrics == {"grad_norm": 2.0}
    assert api.paths() == ["retrieve_future"] * 3


@pytest.mark.parametrize("trouble", [refusal(500), refusal(429), httpx.ConnectError("refused")])
def test_a_result_is_received_after_a_restart_of_the_server(trouble: Answer) -> None:
    result, _ = poll(wait_for_step, trouble, pending("r"), trouble, DONE)
    assert result.metrics == {"grad_norm": 2.0}


def test_a_failed_request_has_a_reason_and_a_category() -> None:
    failure = httpx.Response(200, json={"error": "no such loss", "category": "user"})
    with pytest.raises(RequestFailed, match="no such loss") as caught:
        poll(wait_for_pass, failure)
    assert (caught.value.request_id, caught.value.category) == ("r", "user")


def test_a_load_of_a_missing_checkpoint_fails_as_not_found() -> None:
    assert Reason.CHECKPOINT_NOT_FOUND.message == NOT_FOUND
    failure = httpx.Response(200, json={"error": NOT_FOUND, "category": "user"})
    with pytest.raises(CheckpointNotFound, match="404: Checkpoint not found") as caught:
        poll(wait_for_step, failure)
    assert isinstance(caught.value, NotFoundError)
    assert isinstance(caught.value, RequestFailed)
    assert (caught.value.request_id, caught.value.category) == ("r", "user")
    assert (caught.value.status_code, caught.value.message) == (404, NOT_FOUND)


def test_a_failure_of_an_unknown_category_is_still_a_failure() -> None:
    failure = httpx.Response(200, json={"error": "odd", "category": "weather"})
    with pytest.raises(RequestFailed, match="odd") as caught:
        poll(wait_for_step, failure)
    assert caught.value.category == "unknown"


def test_a_pass_result_may_be_protobuf_or_json() -> None:
    binary = protobuf(wire.ForwardBackwardOutput(loss_fn_output_type="A", metrics={"loss:sum": 1}))
    text = {"loss_fn_output_type": "A", "loss_fn_outputs": [], "metrics": {"loss:sum": 1}}
    from_binary, _ = poll(wait_for_pass, binary)
    from_text, _ = poll(wait_for_pass, httpx.Response(200, json=text))
    assert from_binary == from_text


def test_an_unknown_request_is_polled_only_for_a_limited_time() -> None:
    with pytest.raises(NotFoundError):
        poll(wait_for_step, refusal(404))


def test_a_server_that_stays_unreachable_is_an_error() -> None:
    with pytest.raises(APIConnectionError):
        poll(wait_for_step, httpx.ConnectError("gone"), policy=RetryPolicy(give_up_after_s=-1.0))


@pytest.mark.parametrize("content", [b"<html>", b"[1]"])
def test_an_answer_that_is_not_a_result_is_an_error(content: bytes) -> None:
    with pytest.raises(MalformedMessage):
        poll(wait_for_step, httpx.Response(200, content=content))


def test_the_reason_of_a_pending_result_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Test the path from the wire to the logger. Its timing is tested in `test_retries.py`."""
    monkeypatch.setattr(patience, "WARN_AFTER_S", 0.0)
    reason = {"queue_state_reason": "the server's store is restarting"}
    pending_answer = httpx.Response(408, json={"request_id": "r", "queue_state": "paused_capacity", **reason})
    poll(wait_for_step, pending("r"), pending_answer, pending_answer, DONE)
    (message,) = caplog.messages
    assert message == "still waiting, and trying again: the server's store is restarting"


def request(seq_id: int = 0) -> SampleRequest:
    return SampleRequest(
        sampling_session_id="s",
        seq_id=seq_id,
        prompt=ModelInput.from_ints([1]),
        sampling_params=SamplingParams(max_tokens=1),
    )


def through(
    api: FakeSampling, work: Callable[[SampleRequests], Awaitable[Any]], policy: RetryPolicy | None = None
) -> Any:
    """Do `work` with the requests of a server. A pause lasts one turn of the loop."""

    async def run() -> Any:
        transport = Transport(
            "http://server", "k", network=api.network, policy=policy, sleep=lambda _: asyncio.sleep(0)
        )
        try:
            return await work(SampleRequests(transport))
        finally:
            await transport.close()

    return asyncio.run(run())


def test_a_busy_server_is_polled_by_few_callers_while_others_wait() -> None:
    many = POSTS_AT_ONCE * 3
    api = FakeSampling(answers={"asample": [refusal(429) for _ in range(many)]})

    async def accept_all(requests: SampleRequests) -> None:
        await asyncio.gather(*(requests.accept(request(n)) for n in range(many)))

    through(api, accept_all)
    refused = {body["seq_id"] for body in api.bodies("asample")[:many]}
    assert len(refused) == POSTS_AT_ONCE
    assert len(api.samples) == many


def test_concurrent_polls_are_limited_by_the_server() -> None:
    config = httpx.Response(200, json={"sample_max_concurrent_requests": 2})
    api = FakeSampling(answers={"client/config": [config], "asample": [refusal(429) for _ in range(10)]})
    # Long enough for all ten to be sent before the first refusals are answered.
    policy = RetryPolicy(first_delay_s=0.02, longest_delay_s=0.02)
    with ServiceClient("http://server", "k", network=api.network, policy=policy) as service:
        sampler = service.create_sampling_client(base_model="m")
        prompt = ModelInput.from_ints([1])
        for future in [sampler.sample(prompt) for _ in range(10)]:
            future.result()
    assert {body["seq_id"] for body in api.bodies("asample")[:10]} == {0, 1}


def test_a_busy_server_is_an_error_after_the_time_limit() -> None:
    api = FakeSampling(answers={"asample": [refusal(429) for _ in range(5)]})
    accepted = through(api, lambda requests: requests.accept(request()), RetryPolicy(give_up_after_s=-1))
    assert accepted.sample_sequence_ids == ["s:0/0"]


def test_a_refusal_is_final() -> None:
    api = FakeSampling(answers={"asample": [refusal(422, "no such field")]})
    with pytest.raises(UnprocessableEntityError, match="no such field"):
        through(api, lambda requests: requests.accept(request()))


@pytest.mark.parametrize("answer", [refusal(404), httpx.ConnectError("away")])
def test_a_cancellation_that_does_not_reach_the_server_is_dropped(answer: Any) -> None:
    api = FakeSampling(answers={"cancel_future": [answer]})
    through(api, lambda requests: requests.cancel("s:0"))
    assert api.paths() == ["cancel_future"]


def test_a_pending_result_is_polled_until_it_is_available() -> None:
    api = FakeSampling()
    gate = api.hold["s:0"] = threading.Event()

    async def accept_and_retrieve(requests: SampleRequests) -> Any:
        await requests.accept(request())
        result = asyncio.create_task(requests.retrieve("s:0"))
        await until(lambda: api.paths().count("retrieve_future") >= 3)
        gate.set()
        return await result

    assert through(api, accept_and_retrieve).sequences[0].tokens == [1]
