"""How much of a client's training is under way to the server at once, and in what order.

Three measures. *Room*: requests that the server has not taken yet fill so much memory and no more;
who asks for more is held in the call. *Dispatch*: of those, so many bytes and requests are sent at
once. *Lanes*: a run's requests are let go in the order of their places, and where the server says
that it is full, none overtakes the one it said it to: a full queue that misses the request its first
one waits for would never empty.

Knows sizes and places; what is sent, and what an answer means, is for `transport.py`.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from cotrain.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

ROOM_BYTES = 256_000_000
ROOM_REQUESTS = 10_000
"""What may wait in memory to be taken by the server. One call always may, whatever its size."""
DISPATCH_BYTES = 50_000_000
DISPATCH_REQUESTS = 32
"""What is sent at once, where the server does not say otherwise; each request holds a connection."""
SLOWEST_REFUSAL = 3
"""A full server is asked again as after so many failures: one request of each run, every 2 s."""


class Room:
    """Memory for requests that the server has not taken. Used from any thread."""

    def __init__(self, must_not_wait: Callable[[], bool] = lambda: False) -> None:
        self._must_not_wait = must_not_wait
        """True on the client's own thread, on which room is given back."""
        self._changed = threading.Condition()
        self._bytes = 0
        self._requests = 0

    def take(self, size_bytes: int, requests: int = 1) -> None:
        """Block this thread until there is room, and take it.

        To be called before a place in a run's order is taken: else the first could wait for the last.
        """
        with self._changed:
            if not self._must_not_wait():
                self._changed.wait_for(lambda: self._fits(size_bytes, requests))
            self._bytes += size_bytes
            self._requests += requests

    def give_back(self, size_bytes: int, requests: int = 1) -> None:
        """Let others have it."""
        with self._changed:
            self._bytes -= size_bytes
            self._requests -= requests
            self._changed.notify_all()

    def _fits(self, size_bytes: int, requests: int) -> bool:
        return not self._requests or (
            self._bytes + size_bytes <= ROOM_BYTES and self._requests + requests <= ROOM_REQUESTS
        )


class Dispatch:
    """What all runs of a client send at once. Lives on the client's own loop."""

    def __init__(self) -> None:
        self.limit_bytes = DISPATCH_BYTES
        self._bytes = 0
        self._requests = 0
        self._lanes: set[Lane] = set()
        """Those in which somebody waits."""

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

    def let_go(self, lane: Lane) -> None:
        """Let go whatever may go now, of this lane first."""
        self._lanes.add(lane)
        for each in (lane, *self._lanes - {lane}):
            each.let_go()
            if not each.is_waiting:
                self._lanes.discard(each)


class _Waiting(NamedTuple):
    seq_id: int
    size_bytes: int
    goes: asyncio.Event


class Lane:
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
        """Whether some request has not had its turn."""
        return bool(self._waiting)

    async def send(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        """Send a request in its turn, and again for as long as the server is full.

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
            self._dispatch.let_go(self)

    def let_go(self) -> None:
        """Let go whoever may go now."""
        while self._waiting and self._may_go(self._waiting[0]):
            first = heapq.heappop(self._waiting)
            self._sending.add(first.seq_id)
            self._dispatch.begin(first.size_bytes)
            first.goes.set()

    async def _send_once(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        await self._turn(_Waiting(seq_id, size_bytes, asyncio.Event()))
        try:
            return await post()
        except RateLimitError:
            self._refused.add(seq_id)
            raise
        finally:
            self._sending.discard(seq_id)
            self._dispatch.end(size_bytes)
            self._dispatch.let_go(self)

    async def _turn(self, me: _Waiting) -> None:
        heapq.heappush(self._waiting, me)
        self._dispatch.let_go(self)
        try:
            await me.goes.wait()
        except asyncio.CancelledError:
            if me.goes.is_set():
                self._sending.discard(me.seq_id)
                self._dispatch.end(me.size_bytes)
            else:
                self._waiting.remove(me)
                heapq.heapify(self._waiting)
            raise

    def _may_go(self, first: _Waiting) -> bool:
        """Whether the first of those that wait may go.

        The first of all that the server has not taken always may: everything behind it needs it.
        """
        if any(refused < first.seq_id for refused in self._refused):
            return False
        is_first_of_all = not any(seq_id < first.seq_id for seq_id in self._sending)
        return is_first_of_all or self._dispatch.fits(first.size_bytes)
