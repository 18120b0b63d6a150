from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine

import pytest

from cotrain.errors import APIError, RateLimitError
from cotrain.requests.flow_control import (
    DISPATCH_REQUESTS,
    IN_FLIGHT_BYTES,
    IN_FLIGHT_REQUESTS,
    Dispatch,
    InFlightLimit,
    SendQueue,
)

PATIENCE_S = 120


class Server:
    """Server that answers a posted request when a test calls `take` or `refuse`, and records arrivals."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.taken: list[int] = []
        self._taking: dict[int, asyncio.Future[None]] = {}

    def post(self, seq_id: int) -> Callable[[], Coroutine[None, None, int]]:
        async def posted() -> int:
            self.came.append(seq_id)
            self._taking[seq_id] = asyncio.get_running_loop().create_future()
            await self._taking[seq_id]
            self.taken.append(seq_id)
            return seq_id

        return posted

    async def take(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self._taking.pop(seq_id).set_result(None)
        await settled()

    async def refuse(self, *seq_ids: int, error: type[APIError] = RateLimitError) -> None:
        for seq_id in seq_ids:
            refusal = RateLimitError("full", 429, None) if error is RateLimitError else error("no")
            self._taking.pop(seq_id).set_exception(refusal)
        await settled()


class Pauses:
    """Pauses that end when a test calls `end`."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self._ends: list[asyncio.Event] = []

    async def __call__(self, failures: int, _: RateLimitError, __: float) -> None:
        self.failures.append(failures)
        self._ends.append(asyncio.Event())
        await self._ends[-1].wait()

    async def end(self, count: int | None = None) -> None:
        ending, self._ends = self._ends[:count], self._ends[count or len(self._ends) :]
        for end in ending:
            end.set()
        await settled()


async def settled() -> None:
    """Run the event loop until every task is blocked."""
    for _ in range(50):
        await asyncio.sleep(0)


def start(queue: SendQueue, server: Server, *seq_ids: int, size_bytes: int = 1) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(queue.send(seq_id, size_bytes, server.post(seq_id))) for seq_id in seq_ids]


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch()


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def queue(dispatch: Dispatch, pauses: Pauses) -> SendQueue:
    return SendQueue(dispatch, pauses)


async def test_requests_are_sent_in_order_up_to_the_concurrency_limit(queue: SendQueue, server: Server) -> None:
    count = DISPATCH_REQUESTS + 10
    sends = start(queue, server, *range(1, count + 1))
    await settled()
    assert server.came == list(range(1, DISPATCH_REQUESTS + 1))
    await server.take(3)
    assert server.came[-1] == DISPATCH_REQUESTS + 1
    while len(server.taken) < count:
        await server.take(*set(server.came) - set(server.taken))
    assert [await send for send in sends] == list(range(1, count + 1))


async def test_bytes_in_flight_are_limited_and_a_large_request_goes_alone(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 10
    sends = start(queue, server, 1, 2, 3, size_bytes=5) + start(queue, server, 4, size_bytes=99)
    await settled()
    assert server.came == [1, 2]
    await server.take(1, 2)
    assert server.came == [1, 2, 3]
    await server.take(3)
    assert server.came == [1, 2, 3, 4]
    await server.take(4)
    await asyncio.gather(*sends)


async def test_the_first_request_of_a_run_is_sent_at_any_load_of_other_runs(
    dispatch: Dispatch, queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    dispatch.limit_bytes = 10
    greedy = start(queue, server, 1, 2, 3, size_bytes=5)
    modest = start(SendQueue(dispatch, pauses), server, 101, 102, size_bytes=5)
    await settled()
    assert server.came == [1, 2, 101]
    await server.take(101)
    assert server.came == [1, 2, 101, 102]
    await server.take(1, 2, 102)
    await server.take(3)
    await asyncio.gather(*greedy, *modest)


async def test_a_request_with_an_earlier_number_goes_before_waiting_ones(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 10
    later = start(queue, server, 3, 4, 5, size_bytes=5)
    await settled()
    early = start(queue, server, 2, size_bytes=5)
    await settled()
    assert server.came == [3, 4, 2]
    await server.take(2, 3, 4)
    await server.take(5)
    await asyncio.gather(*early, *later)


async def test_no_request_overtakes_one_rejected_by_a_full_server(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    sends = start(queue, server, 1, 2, 3)
    await settled()
    await server.refuse(2, 3)
    sends += start(queue, server, 4)
    await server.take(1)
    assert server.came == [1, 2, 3]
    await pauses.end()
    assert server.came == [1, 2, 3, 2]
    await server.take(2)
    assert server.came == [1, 2, 3, 2, 3]
    await server.take(3)
    await server.take(4)
    assert [await send for send in sends] == [1, 2, 3, 4]
    assert server.taken == [1, 2, 3, 4]


async def test_a_later_pause_that_ends_first_does_not_reorder_requests(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    sends = start(queue, server, 1, 2)
    await settled()
    await server.refuse(2)
    await server.refuse(1)
    await pauses.end(1)
    assert server.came == [1, 2]
    await pauses.end()
    await server.take(1)
    await server.take(2)
    await asyncio.gather(*sends)
    assert server.taken == [1, 2]


async def test_a_full_server_is_retried_without_limit_at_a_bounded_interval(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    (send,) = start(queue, server, 1)
    await settled()
    for _ in range(60):
        await server.refuse(1)
        await pauses.end()
    await server.take(1)
    assert await send == 1
    assert Counter(pauses.failures) == {1: 1, 2: 1, 3: 58}


async def test_a_request_that_fails_delays_no_other(queue: SendQueue, server: Server) -> None:
    first, second = start(queue, server, 1, 2)
    await settled()
    await server.refuse(1, error=APIError)
    await server.take(2)
    with pytest.raises(APIError):
        await first
    assert await second == 2


async def test_a_request_cancelled_while_waiting_is_removed(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 1
    first, second, third = start(queue, server, 1, 2, 3)
    await settled()
    second.cancel()
    await settled()
    await server.take(1)
    assert server.came == [1, 3]
    await server.take(3)
    await asyncio.gather(first, third)


async def test_waiting_requests_keep_their_order_when_the_first_is_cancelled(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 1
    first, second, *others = start(queue, server, 1, 2, 5, 3, 6)
    await settled()
    second.cancel()
    await settled()
    for seq_id in (1, 3, 5, 6):
        await server.take(seq_id)
    assert server.came == [1, 3, 5, 6]
    await asyncio.gather(first, *others)


async def test_a_request_cancelled_while_sending_releases_its_share(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 1
    first, second = start(queue, server, 1, 2)
    await settled()
    first.cancel()
    await settled()
    assert server.came == [1, 2]
    await server.take(2)
    assert await second == 2
    assert dispatch.fits(1)


@pytest.mark.parametrize(("size_bytes", "requests"), [(IN_FLIGHT_BYTES, 1), (1, IN_FLIGHT_REQUESTS)])
def test_a_call_beyond_the_limit_blocks_until_enough_is_released(size_bytes: int, requests: int) -> None:
    limit, is_in = InFlightLimit(), threading.Event()
    limit.acquire(size_bytes, requests)

    def enter() -> None:
        limit.acquire(2)
        is_in.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not is_in.wait(0.05)
    limit.release(size_bytes, requests)
    assert is_in.wait(PATIENCE_S)
    thread.join()


def test_one_call_is_always_under_the_limit() -> None:
    limit = InFlightLimit()
    limit.acquire(10 * IN_FLIGHT_BYTES, 10 * IN_FLIGHT_REQUESTS)
    limit.release(10 * IN_FLIGHT_BYTES, 10 * IN_FLIGHT_REQUESTS)
    limit.acquire(IN_FLIGHT_BYTES, IN_FLIGHT_REQUESTS)


def test_the_loop_that_releases_never_waits() -> None:
    limit = InFlightLimit(must_not_wait=lambda: True)
    for _ in range(3):
        limit.acquire(IN_FLIGHT_BYTES)
