from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from cotrain.errors import ClientClosed, RequestFailed
from cotrain.requests.futures import Future, Submitted


@pytest.fixture
def outcome() -> concurrent.futures.Future[int]:
    return concurrent.futures.Future()


@pytest.fixture
def future(outcome: concurrent.futures.Future[int]) -> Future[int]:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    accepted.set_result(None)
    return Future(accepted, outcome)


def test_a_future_serves_threads_and_loops_any_number_of_times(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    async def three_waiters() -> list[int]:
        asyncio.get_running_loop().call_soon(outcome.set_result, 7)
        return [*await asyncio.gather(future, future.result_async(), future.result_async(timeout=60))]

    assert asyncio.run(three_waiters()) == [7, 7, 7]
    assert asyncio.run(future.result_async()) == 7  # on another loop, afterwards
    assert future.result(timeout=0) == 7
    assert future.done()


def test_a_waiter_on_another_thread_wakes_up(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(future.result()))
    waiter.start()
    outcome.set_result(3)
    waiter.join(timeout=120)
    assert results == [3]


def test_cancelling_a_wait_does_not_cancel_the_request(
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


def test_a_failure_is_raised_in_every_waiter(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    outcome.set_exception(RequestFailed("no", "r", "user"))
    for _ in range(2):
        with pytest.raises(RequestFailed):
            future.result()
        with pytest.raises(RequestFailed):
            asyncio.run(future.result_async())


def test_a_closed_client_raises_an_error(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    outcome.cancel()
    with pytest.raises(ClientClosed):
        future.result()
    with pytest.raises(ClientClosed):
        asyncio.run(future.result_async())


def test_a_timeout_error_names_the_pending_request_and_the_remedy() -> None:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = Future(accepted, outcome, what="optim_step 4 of run s:train:0")
    message = "^optim_step 4 of run s:train:0 is still on its way to the server after 0 s: wait again "
    with pytest.raises(TimeoutError, match=message):
        future.result(timeout=0)
    accepted.set_result(None)
    message = "is still running after 0.01 s: wait again for the same future$"
    with pytest.raises(TimeoutError, match=message):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError, match=message):
        asyncio.run(future.result_async(timeout=0.01))


def test_a_timeout_of_the_request_itself_is_raised_unchanged(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    outcome.set_exception(TimeoutError("the caller's loss took too long"))
    with pytest.raises(TimeoutError, match="the caller's loss"):
        future.result(timeout=0)


def test_a_future_shows_its_request_and_its_state() -> None:
    def made(outcome: concurrent.futures.Future[int]) -> Future[int]:
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        accepted.set_result(None)
        return Future(accepted, outcome, what="optim_step 4 of run r")

    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(1)
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(RequestFailed("no such loss", "r:4", "user"))
    running = made(concurrent.futures.Future())
    assert repr(running) == "<Future of optim_step 4 of run r: still running>"
    assert repr(Submitted(running)) == f"<Submitted: {running!r}>"
    running.cancel()
    assert repr(running) == "<Future of optim_step 4 of run r: given up>"
    assert repr(made(done)) == "<Future of optim_step 4 of run r: done>"
    assert repr(made(failed)) == "<Future of optim_step 4 of run r: failed: no such loss>"
    with pytest.raises(RequestFailed):
        made(failed).result()
