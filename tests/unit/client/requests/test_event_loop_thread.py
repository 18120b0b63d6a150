from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from cotrain.errors import ClientClosed
from cotrain.requests.event_loop_thread import BackgroundLoop, cancel_the_rest_and

if TYPE_CHECKING:
    from collections.abc import Iterator

FOREVER = 3600


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop("test")
    yield background
    background.close(nothing)


async def nothing() -> None: ...


def test_a_call_from_the_clients_own_thread_is_refused_for_it_would_wait_for_itself(
    loop: BackgroundLoop,
) -> None:
    async def call_back() -> None:
        loop.run(nothing())

    with pytest.raises(RuntimeError, match="would wait for itself"):
        loop.run(call_back())


def test_cancelling_a_wait_reaches_the_work(loop: BackgroundLoop) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.set()

    async def give_up() -> None:
        waiting = asyncio.create_task(loop.run_async(work()))
        assert await asyncio.to_thread(started.wait, 120)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    assert ended.wait(120)


def test_closing_raises_in_calls_that_wait(loop: BackgroundLoop) -> None:
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    async def wait() -> None:
        with pytest.raises(ClientClosed):
            await loop.run_async(work())

    def close() -> None:
        started.wait(120)
        loop.close(nothing)

    closer = threading.Thread(target=close)
    closer.start()
    asyncio.run(wait())
    closer.join()
    with pytest.raises(ClientClosed):
        loop.run(nothing())


def test_closing_cancels_no_task_before_it_began_so_that_python_has_nothing_to_warn_of() -> None:
    begun = asyncio.Event()

    async def connect() -> None:
        begun.set()
        await asyncio.sleep(FOREVER)

    async def ask() -> None:
        async with anyio.create_task_group() as connecting:  # as httpx connects
            connecting.start_soon(connect)
            await asyncio.sleep(FOREVER)

    async def close() -> None:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        assert not begun.is_set()
        await cancel_the_rest_and(nothing)
        assert asking.cancelled()
        assert begun.is_set()

    asyncio.run(close())
    gc.collect()
