"""A poll's answer is waited for when its route has returned, and is refused like any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from cotrain_server.errors import TooManyPolls
from cotrain_server.http import long_poll as held
from cotrain_server.http.long_poll import Held, answer_held
from cotrain_store.errors import RequestNotFound, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import pytest
    from starlette.types import Message, Scope


async def _answered(wait: Callable[[], Coroutine[Any, Any, Response]]) -> list[Message]:
    scope: Scope = {"type": "http", "state": {"request_id": "r"}}
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await Held(wait)(scope, receive, send)
    assert sent == []
    await answer_held(scope, receive, send)
    await answer_held(scope, receive, send)  # once is enough
    return sent


async def test_the_answer_is_sent_by_the_edge() -> None:
    async def wait() -> Response:
        return Response(b"42")

    start, body = await _answered(wait)
    assert (start["status"], body["body"]) == (200, b"42")


async def test_an_error_is_refused_as_if_the_route_had_raised_it() -> None:
    async def unknown() -> Response:
        raise RequestNotFound

    async def busy() -> Response:
        raise TooManyPolls

    assert (await _answered(unknown))[0]["status"] == 404
    start = (await _answered(busy))[0]
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]


async def test_a_store_that_goes_away_meanwhile_is_not_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "HOLD_S", 0)

    async def wait() -> Response:
        raise StoreUnavailable

    assert (await _answered(wait))[0]["status"] == 408
