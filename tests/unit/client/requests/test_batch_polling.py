from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from cotrain.clients.sampling import Completions
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy
from cotrain.types import SamplingSessionTarget
from tests.support.fake_api import Answer, FakeApi, refusal

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
        await asyncio.gather(*(completions.ended(each) for each in "abc"))

    asked = poll(wait_for_three, ended(2, "b", "a"), ended(3, "c"))
    assert [body["prev_cursor"] for body in asked] == [0, 2]
    assert asked[0]["target"] == TARGET.model_dump()
    assert "timeout" not in asked[0]


def test_a_result_that_arrives_before_its_caller_is_kept() -> None:
    async def wait_late(completions: Completions) -> None:
        await completions.ended("late")
        await completions.ended("early")

    assert len(poll(wait_late, ended(2, "early", "late"))) == 1


def test_a_received_result_is_acknowledged_until_the_server_answers() -> None:
    async def wait_and_acknowledge(completions: Completions) -> None:
        await completions.ended("a")
        completions.retrieved("a")

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
        completions.retrieved("a")
        await is_asked.wait()
        completions.retrieved("b")
        may_answer.set()
        assert completions.task is not None
        await completions.task
        await transport.close()

    asyncio.run(run())
    assert acknowledged == [["a"], ["b"]]


def test_no_poll_is_sent_without_waiters_and_acknowledgements() -> None:
    async def one_after_another(completions: Completions) -> None:
        await completions.ended("a")
        assert completions.task is None
        await completions.ended("b")

    assert len(poll(one_after_another, ended(1, "a"), ended(2, "b"))) == 2


@pytest.mark.parametrize("answer", [refusal(429), refusal(500), httpx.ReadError("cut")])
def test_a_transient_error_is_retried(answer: Answer) -> None:
    asked = poll(lambda completions: completions.ended("a"), answer, ended(1, "a"))
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
        await asyncio.gather(completions.ended("a"), completions.ended("b"))
        completions.retrieved("a")
        await completions.ended("c")

    assert len(poll(wait_twice, answer, policy=policy)) == 1
