"""Order and limits of a client's training requests until the server accepts them.

* *InFlightLimit* bounds the memory of requests that the server has not accepted yet; a call beyond it blocks.
* *Dispatch* bounds the bytes and requests that are being sent at once.
* *SendQueue* sends a run's requests in the order of their `seq_id`. No request overtakes one that a full server
  rejected: the server would stay full of requests that wait for the missing one.
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
"""Limits of the memory for unaccepted requests. A single call is always allowed, whatever its size."""
DISPATCH_BYTES = 50_000_000
DISPATCH_REQUESTS = 32
"""Default limits of concurrent sending; the server may set the bytes. Each request holds a connection."""
SLOWEST_REFUSAL = 3
"""Cap on the failure count for the delay after a full server: one request of each run, every 2 s."""


class InFlightLimit:
    """Memory limit of requests that the server has not accepted. Used from any thread."""

    def __init__(self, must_not_wait: Callable[[], bool] = lambda: False) -> None:
        self._must_not_wait = must_not_wait
        """Returns True on the client's own thread, because that thread calls `release`."""
        self._changed = threading.Condition()
        self._bytes = 0
        self._requests = 0

    def acquire(self, size_bytes: int, requests: int = 1) -> None:
        """Block this thread until the request fits under the limit, and count it.

        Call it before taking a `seq_id`; otherwise the first request of a run could wait for its last.
        """
        with self._changed:
            if not self._must_not_wait():
                self._changed.wait_for(lambda: self._fits(size_bytes, requests))
            self._bytes += size_bytes
            self._requests += requests

    def release(self, size_bytes: int, requests: int = 1) -> None:
        """Stop counting a request, and wake the blocked calls."""
        with self._changed:
            self._bytes -= size_bytes
            self._requests -= requests
            self._changed.notify_all()

    def _fits(self, size_bytes: int, requests: int) -> bool:
        return not self._requests or (
            self._bytes + size_bytes <= IN_FLIGHT_BYTES and self._requests + requests <= IN_FLIGHT_REQUESTS
        )


class Dispatch:
    """Limit on concurrent sending for all runs of a client. Runs on the client's own loop."""

    def __init__(self) -> None:
        self.limit_bytes = DISPATCH_BYTES
        self._bytes = 0
        self._requests = 0
        self._queues: set[SendQueue] = set()
        """Queues with waiting requests."""

    def fits(self, size_bytes: int) -> bool:
        """Return True if a request of this size may be sent now."""
        return self._requests < DISPATCH_REQUESTS and self._bytes + size_bytes <= self.limit_bytes

    def begin(self, size_bytes: int) -> None:
        """Count a request that is being sent."""
        self._bytes += size_bytes
        self._requests += 1

    def end(self, size_bytes: int) -> None:
        """Stop counting a request."""
        self._bytes -= size_bytes
        self._requests -= 1

    def start_from(self, queue: SendQueue) -> None:
        """Start every request that may be sent now, those of this queue first."""
        self._queues.add(queue)
        for each in (queue, *self._queues - {queue}):
            each.start()
            if not each.is_waiting:
                self._queues.discard(each)


class SendQueue:
    """Unaccepted requests of one run, in order. Runs on the client's own loop."""

    def __init__(self, dispatch: Dispatch, pause: Callable[[int, RateLimitError, float], Awaitable[None]]) -> None:
        self._dispatch = dispatch
        self._pause = pause
        self._waiting: list[_Waiting] = []  # a heap
        self._sending: set[int] = set()
        self._refused: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """True if at least one request is not being sent yet."""
        return bool(self._waiting)

    async def send(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        """Send a request in the order of `seq_id`, and retry while the server is full.

        `post` raises RateLimitError if the server is full. All other errors of `post` are raised.
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
        request = _Waiting(seq_id, size_bytes, asyncio.Event())
        heapq.heappush(self._waiting, request)
        self._dispatch.start_from(self)
        await request.started.wait()  # only the end of the client cancels it
        try:
            return await post()
        except RateLimitError:
            self._refused.add(seq_id)
            raise
        finally:
            self._sending.discard(seq_id)
            self._dispatch.end(size_bytes)
            self._dispatch.start_from(self)

    def _may_start(self, first: _Waiting) -> bool:
        """Return True if the first waiting request may be sent.

        The run's first unaccepted request is always allowed, because all later ones depend on it.
        """
        if any(refused < first.seq_id for refused in self._refused):
            return False
        is_first_of_all = not any(seq_id < first.seq_id for seq_id in self._sending)
        return is_first_of_all or self._dispatch.fits(first.size_bytes)


class _Waiting(NamedTuple):
    seq_id: int
    size_bytes: int
    started: asyncio.Event
