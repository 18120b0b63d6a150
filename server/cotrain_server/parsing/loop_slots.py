"""Slots of requests in each iteration of the event loop, so that a burst does not delay heartbeats and polls.

The event loop runs everything that is ready in one iteration. 500 requests that arrive together would take half a
second. The answer to a heartbeat needs several iterations.
"""

import asyncio
from collections import deque

#: Requests that start, or read their next block, in one iteration of the event loop. One takes up to a millisecond.
AT_ONCE = 2


class LoopSlots:
    """Slots in order of arrival, AT_ONCE in each iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._is_renewing = False

    async def take(self) -> None:
        """Return when the caller has a slot: at once, if one is left in this iteration, else in a later one."""
        if self._left:
            self._left -= 1
            self._renew_soon()
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        await slot

    def _renew_soon(self) -> None:
        if not self._is_renewing:
            self._is_renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._is_renewing = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            slot = self._waiting.popleft()
            if not slot.done():  # its client has not disconnected
                slot.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._renew_soon()
