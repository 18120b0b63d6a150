"""Work whose client has disconnected is not done."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from cotrain_server.http.disconnect import while_connected

if TYPE_CHECKING:
    from starlette.types import Message


class Client:
    """Hangs up on demand."""

    def __init__(self) -> None:
        self.hangs_up = asyncio.Event()

    async def receive(self) -> Message:
        await self.hangs_up.wait()
        return {"type": "http.disconnect"}


async def test_the_answer_is_given_to_a_client_that_stays() -> None:
    async def answer() -> int:
        return 3

    assert await while_connected(Client().receive, answer()) == 3


async def test_an_error_reaches_the_route() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(Client().receive, fail())


async def test_the_work_ends_with_its_client_even_if_it_overhears_that_once() -> None:
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


async def test_the_work_ends_with_its_route() -> None:
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
