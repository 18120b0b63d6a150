"""When the requests that wait are read: at once, but those of a flood in half of this process's time if others work.

Without that a tenant with thousands of requests a second keeps a core busy, and makes each iteration of the event loop as
long as an answer to sixteen requests: a neighbour's sample, which takes many iterations, was four times as slow.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic

from cotrain_server.http.request_queue import RequestQueue, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_server.http.request_queue import Caller

#: Of this process's time, for floods: a tenant alone with it has all.
FLOOD_SHARE = 0.5
#: Where others alone take more than the rest, a flood is read all the same: AT_ONCE requests each time.
LONGEST_PAUSE_S = 0.1


class RequestReader(Generic[Waiting]):
    """Calls `read` with what waits. Not for threads: belongs to the event loop in which `wait` is called."""

    def __init__(
        self,
        read: Callable[[Waiting], None],
        clock: Callable[[], float] = time.monotonic,
        busy_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = read
        self._clock = clock
        self._busy_clock = busy_clock
        self._queue = RequestQueue[Waiting]()
        self._is_scheduled = False
        self._is_paused = False
        self._round_began = 0.0
        self._busy_before = 0.0

    def wait(self, caller: Caller, waiting: Waiting) -> None:
        """Have it read when its caller is next."""
        self._queue.wait(caller, waiting, self._clock())
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._read_next)

    def _read_next(self) -> None:
        self._is_scheduled = False
        loop = asyncio.get_running_loop()
        for waiting in self._queue.take(only_unserved=self._is_paused):
            loop.call_soon(self._read, waiting)  # apart: an error in one is not the others'
        if self._is_paused or not self._queue:
            return
        if not self._queue.is_round_over:
            self._schedule()
        else:
            self._is_paused = True
            loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        """Begin the next round, now or when this one has had no more than its share of the time since it began."""
        now, busy = self._clock(), self._busy_clock()
        lasted_s, busy_s = now - self._round_began, busy - self._busy_before
        pause_s = min(busy_s / FLOOD_SHARE, LONGEST_PAUSE_S) - lasted_s
        if pause_s > 0 and self._queue.holds_up_others(now):
            asyncio.get_running_loop().call_later(pause_s, self._end_round)
            return
        self._is_paused = False
        self._round_began, self._busy_before = now, busy
        self._queue.begin_round()
        self._read_next()
