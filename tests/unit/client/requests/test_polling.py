from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cotrain.errors import (
    APIConnectionError,
    CheckpointNotFound,
    MalformedMessage,
    NotFoundError,
    RequestFailed,
)
from cotrain.requests.polling import NOT_FOUND, wait_for_json, wait_for_pass
from cotrain.transport import retries as patience
from cotrain.transport.http import RetryPolicy, Transport
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import OptimStepResponse
from cotrain_store import errors as store_errors
from tests.support.fake_api import FakeApi, pending, protobuf, refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.fake_api import Answer


async def wait_for_step(transport: Transport, request_id: str) -> OptimStepResponse:
    return await wait_for_json(transport, request_id, OptimStepResponse)


def poll(
    waiting: Callable[[Transport, str], Awaitable[Any]],
    *answers: Answer,
    policy: RetryPolicy | None = None,
) -> tuple[Any, FakeApi]:
    api = FakeApi(answers={"retrieve_future": list(answers)})

    async def at_once(_: float) -> None:
        return None

    async def run() -> Any:
        transport = Transport(
            "http://server", "k", network=api.network, policy=policy, sleep=at_once
        )
        try:
            return await waiting(transport, "r")
        finally:
            await transport.close()

    return asyncio.run(run()), api


DONE = httpx.Response(200, json={"metrics": {"grad_norm": 2.0}})


def test_a_pending_result_is_asked_for_again() -> None:
    result, api = poll(wait_for_step, pending("r"), pending("r"), DONE)
    assert result.metrics == {"grad_norm": 2.0}
    assert api.paths() == ["retrieve_future"] * 3


@pytest.mark.parametrize("trouble", [refusal(500), refusal(429), httpx.ConnectError("refused")])
def test_a_result_outlives_a_server_that_restarts(trouble: Answer) -> None:
    result, _ = poll(wait_for_step, trouble, pending("r"), trouble, DONE)
    assert result.metrics == {"grad_norm": 2.0}


def test_a_failed_request_says_why_and_whose_fault_it_is() -> None:
    failure = httpx.Response(200, json={"error": "no such loss", "category": "user"})
    with pytest.raises(RequestFailed, match="no such loss") as caught:
        poll(wait_for_pass, failure)
    assert (caught.value.request_id, caught.value.category) == ("r", "user")


def test_a_load_of_nothing_is_a_failed_request_and_a_thing_not_found() -> None:
    assert store_errors.CheckpointNotFound.__doc__ == NOT_FOUND
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


def test_a_pass_may_come_as_protobuf_or_as_json() -> None:
    binary = protobuf(wire.ForwardBackwardOutput(loss_fn_output_type="A", metrics={"loss:sum": 1}))
    text = {"loss_fn_output_type": "A", "loss_fn_outputs": [], "metrics": {"loss:sum": 1}}
    from_binary, _ = poll(wait_for_pass, binary)
    from_text, _ = poll(wait_for_pass, httpx.Response(200, json=text))
    assert from_binary == from_text


def test_an_unknown_request_is_not_polled_for_ever() -> None:
    with pytest.raises(NotFoundError):
        poll(wait_for_step, refusal(404))


def test_a_server_that_stays_unreachable_is_an_error_in_the_end() -> None:
    with pytest.raises(APIConnectionError):
        poll(wait_for_step, httpx.ConnectError("gone"), policy=RetryPolicy(give_up_after_s=-1.0))


@pytest.mark.parametrize("content", [b"<html>", b"[1]"])
def test_what_is_no_result_is_an_error(content: bytes) -> None:
    with pytest.raises(MalformedMessage):
        poll(wait_for_step, httpx.Response(200, content=content))


def test_why_a_result_is_not_there_yet_reaches_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the wire to the logger; when it is message is for `test_patience.py`."""
    monkeypatch.setattr(patience, "WARN_AFTER_S", 0.0)
    reason = {"queue_state_reason": "the server's store is restarting"}
    pending_answer = httpx.Response(
        408, json={"request_id": "r", "queue_state": "paused_capacity", **reason}
    )
    poll(wait_for_step, pending("r"), pending_answer, pending_answer, DONE)
    (message,) = caplog.messages
    assert message == "still waiting, and trying again: the server's store is restarting"
