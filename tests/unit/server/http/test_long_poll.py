"""A poll's answer is waited for, and refused like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from cotrain_server.errors import TooManyPolls
from cotrain_server.http import long_poll
from cotrain_server.http.long_poll import answered
from cotrain_store.errors import RequestNotFound, StoreUnavailable

if TYPE_CHECKING:
    import pytest


async def _raise(error: Exception) -> Response:
    raise error


async def test_the_answer_is_what_the_endpoint_says() -> None:
    async def endpoint() -> Response:
        return Response(b"42")

    answer = await answered(endpoint(), "r")
    assert (answer.status_code, answer.body) == (200, b"42")


async def test_an_error_is_refused_as_if_a_route_had_raised_it() -> None:
    assert (await answered(_raise(RequestNotFound()), "r")).status_code == 404
    busy = await answered(_raise(TooManyPolls()), "r")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


async def test_a_store_that_becomes_unavailable_is_not_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_poll, "HOLD_S", 0)
    assert (await answered(_raise(StoreUnavailable()), "r")).status_code == 408
