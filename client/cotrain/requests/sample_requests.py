"""The HTTP calls of sampling, no more at once than either side bears."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from cotrain.errors import APIError, RateLimitError
from cotrain.requests.polling import wait_for_sample
from cotrain.transport.http import acknowledged, reader
from cotrain.wire.futures import UntypedAPIFuture
from cotrain.wire.sampling import CancelFutureRequest

if TYPE_CHECKING:
    from cotrain.transport.http import Transport
    from cotrain.wire.sampling import SampleRequest, SampleResponse

POSTS_AT_ONCE = 32
"""Of a thousand samples that a busy server turns away, so many ask again and the others wait."""
POLLS_AT_ONCE = 500
"""Each holds a connection; the other half is for training and heartbeats."""
CANCEL_WITHIN_S = 5.0


class SampleRequests:
    """Shared by all samplers of one connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.limit(POLLS_AT_ONCE)

    def limit(self, samples: int) -> None:
        """Have no more than so many on their way; the server says so before the first is sent."""
        self._posts = asyncio.Semaphore(min(samples, POSTS_AT_ONCE))
        self._polls = asyncio.Semaphore(min(samples, POLLS_AT_ONCE))

    async def accept(self, request: SampleRequest) -> UntypedAPIFuture:
        """POST a sample request until the server has it, however long it is busy.

        The same `seq_id` each time: to ask twice is to ask once. Raises APIError.
        """
        async with self._posts:
            while True:
                try:
                    return await self._transport.post("asample", request, reader(UntypedAPIFuture))
                except RateLimitError:
                    continue  # which the transport has reported

    async def retrieve(self, request_id: str) -> SampleResponse:
        """Wait for the result of a sample request. Raises RequestFailed or APIError."""
        async with self._polls:
            return await wait_for_sample(self._transport, request_id)

    async def cancel(self, request_id: str) -> None:
        """Cancel a sample whose result is no longer wanted; one that this does not reach is done all the same."""
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await self._transport.post_once(
                    "cancel_future", CancelFutureRequest(request_id=request_id), acknowledged
                )
