"""How much of a client's training is under way to the server at once, and in what order.

Three limits. *InFlightLimit*: requests that the server has not accepted yet fill so much memory and no
more; a call beyond that blocks. *Dispatch*: of those, so many bytes and requests are sent at once.
*SendQueue*: a run's requests are sent in the order of their `seq_id`, and none overtakes one that the
server refused for being full: a full server that lacks the request its first one waits for would
never empty.

Knows sizes and order; what is sent, and what an answer means, is for `transport/`.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from cotrain.errors import RateLimitError

T = TypeVar("T")

IN_FLIGHT_BYTES = 256_000_000
IN_FLIGHT_REQUESTS = 10_000
"""What may wait in memory for the server to accept it. One call always may, whatever its size."""
DISPATCH_BYTES = 50_000_000
DISPATCH_REQUESTS = 32
"""What is sent at once, where the server does not say otherwise; each request holds a connection."""
SLOWEST_REFUSAL = 3
"""A full server is asked again as after so many failures: one request of each run, every 2 s."""


class InFlightLimit:
    """Limits the memory of requests that the server has not accepted. Used from any thread."""

    def __init__(self, must_not_wait: Callable[[], bool] = lambda: False) -> None:
        self._must_not_wait = must_not_wait
        """True on the client's own thread, which is the one that releases."""
        self._changed = threading.Condition()
        self._bytes = 0
        self._requests = 0

    def acquire(self, size_bytes: int, requests: int = 1) -> None:
        """Block this thread until so much is under the limit, and count it.

        To be called before a `seq_id` is taken: else the first of a run could wait for its last.
        """
        with self._changed:
            if not self._must_not_wait():
                self._changed.wait_for(lambda: self._fits(size_bytes, requests))
            self._bytes += size_bytes
            self._requests += requests

    def release(self, size_bytes: int, requests: int = 1) -> None:
        """Count it no more, and wake the calls that wait."""
        with self._changed:
            self._bytes -= size_bytes
            self._requests -= requests
            self._changed.notify_all()

    def _fits(self, size_bytes: int, requests: int) -> bool:
        return not self._requests or (
            self._bytes + size_bytes <= IN_FLIGHT_BYTES
            and self._requests + requests <= IN_FLIGHT_REQUESTS
        )


class Dispatch:
    """What all runs of a client send at once. Lives on the client's own loop."""

    def __init__(self) -> None:
        self.limit_bytes = DISPATCH_BYTES
        self._bytes = 0
        self._requests = 0
        self._queues: set[SendQueue] = set()
        """Those in which requests wait."""

    def fits(self, size_bytes: int) -> bool:
        """Say whether so much more may be sent."""
        return self._requests < DISPATCH_REQUESTS and self._bytes + size_bytes <= self.limit_bytes

    def begin(self, size_bytes: int) -> None:
        """Count a request that is being sent."""
        self._bytes += size_bytes
        self._requests += 1

    def end(self, size_bytes: int) -> None:
        """Count it no more."""
        self._bytes -= size_bytes
        self._requests -= 1

    def start_from(self, queue: SendQueue) -> None:
        """Start every request that may be sent now, those of this queue first."""
        self._queues.add(queue)
        for each in (queue, *self._queues - {queue}):
            each.start()
            if not each.is_waiting:
                self._queues.discard(each)


class _Waiting(NamedTuple):
    seq_id: int
    size_bytes: int
    started: asyncio.Event


class SendQueue:
    """One run's requests on their way to the server. Lives on the client's own loop."""

    def __init__(
        self, dispatch: Dispatch, pause: Callable[[int, RateLimitError, float], Awaitable[None]]
    ) -> None:
        self._dispatch = dispatch
        self._pause = pause
        self._waiting: list[_Waiting] = []  # a heap
        self._sending: set[int] = set()
        self._refused: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether some request is not being sent yet."""
        return bool(self._waiting)

    async def send(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        """Send a request in the order of `seq_id`, and again for as long as the server is full.

        `post` raises RateLimitError where it is. Raises whatever else `post` raises.
        """
        refusals, began = 0, time.monotonic()
        try:
            while True:
                try:
                    return await self._send_once(seq_id, size_bytes, post)
                except RateLimitError as full:
                    refusals += 1
                    waited_s = time.monotonic() - began
                    await self._pause(min(refusals, SLOWEST_REFUSAL), full, waited_s)
        finally:
            self._refused.discard(seq_id)
            self._dispatch.start_from(self)

    def start(self) -> None:
        """Start the requests that may be sent now."""
        while self._waiting and self._may_start(self._waiting[0]):
            first = heapq.heappop(self._waiting)
            self._sending.add(first.seq_id)
            self._dispatch.begin(first.size_bytes)
            first.started.set()

    async def _send_once(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        await self._wait_to_start(_Waiting(seq_id, size_bytes, asyncio.Event()))
        try:
            return await post()
        except RateLimitError:
            self._refused.add(seq_id)
            raise
        finally:
            self._sending.discard(seq_id)
            self._dispatch.end(size_bytes)
            self._dispatch.start_from(self)

    async def _wait_to_start(self, request: _Waiting) -> None:
        heapq.heappush(self._waiting, request)
        self._dispatch.start_from(self)
        try:
            await request.started.wait()
        except asyncio.CancelledError:
            if request.started.is_set():
                self._sending.discard(request.seq_id)
                self._dispatch.end(request.size_bytes)
            else:
                self._waiting.remove(request)
                heapq.heapify(self._waiting)
            raise

    def _may_start(self, first: _Waiting) -> bool:
        """Whether the first of those that wait may be sent.

        The first of all that the server has not accepted always may: everything behind it needs it.
        """
        if any(refused < first.seq_id for refused in self._refused):
            return False
        is_first_of_all = not any(seq_id < first.seq_id for seq_id in self._sending)
        return is_first_of_all or self._dispatch.fits(first.size_bytes)
