"""Long polls: the answer is awaited, and an error is answered like any other.

Work is cancelled when its client disconnects.
"""

import asyncio
import contextlib

import pytest
from starlette.responses import Response
from starlette.types import Message

from cotrain_server.http import long_poll
from cotrain_server.http.long_poll import answered, while_connected
from cotrain_store.errors import Reason, Refused, RequestNotFound, StoreUnavailable


async def _raise(error: Exception) -> Response:
    raise error


async def test_the_answer_is_that_of_the_endpoint() -> None:
    async def endpoint() -> Response:
        return Response(b"42")

    answer = await answered(endpoint(), "r")
    assert (answer.status_code, answer.body) == (200, b"42")


async def test_an_error_has_the_same_response_as_in_a_route() -> None:
    assert (await answered(_raise(RequestNotFound()), "r")).status_code == 404
    busy = await answered(_raise(Refused(Reason.TOO_MANY_POLLS)), "r")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")


async def test_an_unavailable_store_is_reported_as_a_pending_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "HOLD_S", 0)
    assert (await answered(_raise(StoreUnavailable()), "r")).status_code == 408


class Client:
    """Client that disconnects on demand."""

    def __init__(self) -> None:
        self.hangs_up = asyncio.Event()

    async def receive(self) -> Message:
        await self.hangs_up.wait()
        return {"type": "http.disconnect"}


async def test_a_connected_client_gets_the_answer() -> None:
    async def answer() -> int:
        return 3

    assert await while_connected(Client().receive, answer()) == 3


async def test_an_error_is_raised_in_the_route() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(Client().receive, fail())


async def test_the_work_is_cancelled_when_its_client_disconnects() -> None:
    client, cancellations = Client(), list[int]()

    async def deaf_once() -> int:
        client.hangs_up.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        cancellations.append(1)
        await asyncio.Event().wait()
        return 3

    assert await while_connected(client.receive, deaf_once()) is None
    assert cancellations == [1]


async def test_the_work_is_cancelled_with_its_route() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    route = asyncio.create_task(while_connected(Client().receive, work()))
    await started.wait()
    route.cancel()
    with pytest.raises(asyncio.CancelledError):
        await route
    assert ended.is_set()
