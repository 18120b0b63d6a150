from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import pytest

from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    MalformedMessage,
    NotFoundError,
    RateLimitError,
    UnprocessableEntityError,
)
from cotrain.transport import RetryPolicy, Transport, read
from cotrain.types import GetInfoRequest, GetServerCapabilitiesResponse
from tests.support.fake_api import FakeApi, refusal

if TYPE_CHECKING:
    from tests.support.fake_api import Answer

REQUEST = GetInfoRequest(model_id="m")


class Naps:
    """A sleep that only remembers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def post(api: FakeApi, naps: Naps, policy: RetryPolicy | None = None) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = Transport(
            "http://server/prefix/", "tml-key", network=api.network, policy=policy, sleep=naps
        )
        try:
            return await transport.post("get_info", REQUEST)
        finally:
            await transport.close()

    return asyncio.run(once())


def api_answering(*answers: Answer) -> FakeApi:
    return FakeApi(answers={"/prefix/api/v1/get_info": [*answers, httpx.Response(200, json={})]})


def test_every_call_carries_the_key_under_the_prefix_of_the_base_url() -> None:
    api = api_answering()
    post(api, Naps())
    assert api.calls[0].url == "http://server/prefix/api/v1/get_info"
    assert api.calls[0].headers["X-API-Key"] == "tml-key"


@pytest.mark.parametrize(
    "trouble",
    [
        refusal(408),
        refusal(429),
        refusal(500),
        refusal(503),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("closed"),
        httpx.ReadTimeout("slow"),
    ],
)
def test_a_transient_trouble_is_tried_again(trouble: Answer) -> None:
    api, naps = api_answering(trouble, trouble), Naps()
    assert post(api, naps).status_code == 200
    assert len(api.calls) == 3
    assert 0.375 <= naps.seconds[0] <= 0.5
    assert 0.75 <= naps.seconds[1] <= 1.0


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (404, NotFoundError),
        (409, APIStatusError),
        (410, APIStatusError),
        (413, APIStatusError),
        (422, UnprocessableEntityError),
    ],
)
def test_a_refusal_is_never_tried_again(status: int, error_class: type[APIError]) -> None:
    api, naps = api_answering(refusal(status, "because")), Naps()
    with pytest.raises(error_class, match=f"{status}: because"):
        post(api, naps)
    assert len(api.calls) == 1
    assert naps.seconds == []


def test_the_server_says_how_long_to_wait() -> None:
    naps = Naps()
    post(api_answering(refusal(429, "full", **{"Retry-After": "3"})), naps)
    assert naps.seconds == [3.0]


@pytest.mark.parametrize("header", ["-1", "600", "soon", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_an_unreasonable_wait_is_not_obeyed(header: str) -> None:
    naps = Naps()
    post(api_answering(refusal(429, "full", **{"Retry-After": header})), naps)
    assert naps.seconds[0] <= 0.5


@pytest.mark.parametrize(
    ("trouble", "error_class"),
    [
        (refusal(429), RateLimitError),
        (refusal(502), InternalServerError),
        (httpx.ConnectError("refused"), APIConnectionError),
        (httpx.ReadTimeout("slow"), APITimeoutError),
    ],
)
def test_after_its_time_the_last_trouble_is_the_error(
    trouble: Answer, error_class: type[APIError]
) -> None:
    with pytest.raises(error_class):
        post(api_answering(trouble), Naps(), RetryPolicy(give_up_after_s=-1.0))


def test_waits_double_up_to_the_longest() -> None:
    policy, error = RetryPolicy(), APIConnectionError("gone")
    waits = [policy.delay_s(failures, error, jitter=0.0) for failures in range(1, 8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert policy.delay_s(10_000, error, jitter=1.0) == 7.5


def test_an_answer_of_another_shape_is_an_error() -> None:
    response = httpx.Response(200, text="<html>", request=httpx.Request("GET", "http://server/x"))
    with pytest.raises(MalformedMessage, match="GetServerCapabilitiesResponse"):
        read(response, GetServerCapabilitiesResponse)


def test_a_refusal_without_json_says_what_it_can() -> None:
    with pytest.raises(APIStatusError, match="404: Not Found") as caught:
        post(api_answering(httpx.Response(404)), Naps())
    assert caught.value.status_code == 404
