from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from cotrain.errors import ClientClosed, RequestFailed
from cotrain.futures import Future


@pytest.fixture
def outcome() -> concurrent.futures.Future[int]:
    return concurrent.futures.Future()


@pytest.fixture
def future(outcome: concurrent.futures.Future[int]) -> Future[int]:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    accepted.set_result(None)
    return Future(accepted, outcome)


def test_it_serves_threads_and_loops_any_number_of_times(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    async def three_waiters() -> list[int]:
        asyncio.get_running_loop().call_soon(outcome.set_result, 7)
        return [
            *await asyncio.gather(future, future.result_async(), future.result_async(timeout=60))
        ]

    assert asyncio.run(three_waiters()) == [7, 7, 7]
    assert asyncio.run(future.result_async()) == 7  # on another loop, afterwards
    assert future.result(timeout=0) == 7
    assert future.done()


def test_a_waiter_on_another_thread_wakes_up(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(future.result()))
    waiter.start()
    outcome.set_result(3)
    waiter.join(timeout=120)
    assert results == [3]


def test_giving_up_leaves_the_request_alone(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.0)
        waiter = asyncio.create_task(future.result_async())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(give_up())
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert not future.done()
    outcome.set_result(1)  # after the waiters' loop is closed
    assert future.result() == 1


def test_a_failure_reaches_every_waiter(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    outcome.set_exception(RequestFailed("no", "r", "user"))
    for _ in range(2):
        with pytest.raises(RequestFailed):
            future.result()
        with pytest.raises(RequestFailed):
            asyncio.run(future.result_async())


def test_a_closed_client_says_so(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    outcome.cancel()
    with pytest.raises(ClientClosed):
        future.result()
    with pytest.raises(ClientClosed):
        asyncio.run(future.result_async())
