from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cotrain import ModelInput, SamplingParams, ServiceClient, UnprocessableEntityError
from cotrain.requests.sample_requests import POSTS_AT_ONCE, SampleRequests
from cotrain.transport.http import RetryPolicy, Transport
from cotrain.types import SampleRequest
from tests.support.fake_api import refusal
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def request(seq_id: int = 0) -> SampleRequest:
    return SampleRequest(
        sampling_session_id="s",
        seq_id=seq_id,
        prompt=ModelInput.from_ints([1]),
        sampling_params=SamplingParams(max_tokens=1),
    )


def through(
    api: FakeSampling,
    work: Callable[[SampleRequests], Awaitable[Any]],
    policy: RetryPolicy | None = None,
) -> Any:
    """Do `work` with the requests of a server; a pause lasts one turn of the loop."""

    async def run() -> Any:
        transport = Transport(
            "http://server",
            "k",
            network=api.network,
            policy=policy,
            sleep=lambda _: asyncio.sleep(0),
        )
        try:
            return await work(SampleRequests(transport))
        finally:
            await transport.close()

    return asyncio.run(run())


def test_a_busy_server_is_asked_by_a_few_while_the_others_wait() -> None:
    many = POSTS_AT_ONCE * 3
    api = FakeSampling(answers={"asample": [refusal(429) for _ in range(many)]})

    async def accept_all(requests: SampleRequests) -> None:
        await asyncio.gather(*(requests.accept(request(n)) for n in range(many)))

    through(api, accept_all)
    refused = {body["seq_id"] for body in api.bodies("asample")[:many]}
    assert len(refused) == POSTS_AT_ONCE
    assert len(api.samples) == many


def test_no_more_are_on_their_way_than_the_server_allows() -> None:
    config = httpx.Response(200, json={"sample_max_concurrent_requests": 2})
    api = FakeSampling(
        answers={"client/config": [config], "asample": [refusal(429) for _ in range(10)]}
    )
    # Long enough for all ten to be sent before the first refusals are answered.
    policy = RetryPolicy(first_delay_s=0.02, longest_delay_s=0.02)
    with ServiceClient("http://server", "k", network=api.network, policy=policy) as service:
        sampler = service.create_sampling_client(base_model="m")
        prompt = ModelInput.from_ints([1])
        for future in [sampler.sample(prompt) for _ in range(10)]:
            future.result()
    assert {body["seq_id"] for body in api.bodies("asample")[:10]} == {0, 1}


def test_a_server_is_never_too_busy_for_too_long() -> None:
    api = FakeSampling(answers={"asample": [refusal(429) for _ in range(5)]})
    accepted = through(
        api, lambda requests: requests.accept(request()), RetryPolicy(give_up_after_s=-1)
    )
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


def test_a_pending_result_is_polled_for_until_it_is_there() -> None:
    api = FakeSampling()
    gate = api.hold["s:0"] = threading.Event()

    async def accept_and_retrieve(requests: SampleRequests) -> Any:
        await requests.accept(request())
        result = asyncio.create_task(requests.retrieve("s:0"))
        await until(lambda: api.paths().count("retrieve_future") >= 3)
        gate.set()
        return await result

    assert through(api, accept_and_retrieve).sequences[0].tokens == [1]
