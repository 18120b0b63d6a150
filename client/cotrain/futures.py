"""Future[T]: a request that was sent, and the result it will have.

Works from any thread and any event loop, for any number of waiters, any number of times.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cotrain.errors import ClientClosed

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Generator

T = TypeVar("T")


class Future(Generic[T]):
    """The promise of one result. Nobody's waiting, or ceasing to wait, changes it for others."""

    def __init__(
        self,
        accepted: concurrent.futures.Future[Any],
        outcome: concurrent.futures.Future[T],
    ) -> None:
        self._accepted = accepted
        self._outcome = outcome
        self._given_up = False

    def done(self) -> bool:
        """Say whether the result, or the failure, is there."""
        return self._outcome.done()

    def cancel(self) -> bool:
        """Give up this result, for everybody who waits; False where it is there already.

        A sample is cancelled on the server too. A training request has its place in the run's order
        and is done all the same.
        """
        self._given_up = self._outcome.cancel() or self._given_up
        return self._given_up

    def result(self, timeout: float | None = None) -> T:
        """Block this thread for the result.

        Raises RequestFailed if the server failed the request, APIError if it could not be asked,
        TimeoutError after `timeout` seconds (the request itself goes on), and CancelledError after
        `cancel`.
        """
        try:
            return self._outcome.result(timeout)
        except CancelledError:
            if self._given_up:
                raise
            raise ClientClosed("the client was closed before this result came") from None

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - public API
        """Await the result; raises what `result` raises."""
        async with asyncio.timeout(timeout):
            await _settled(self._outcome)
        return self.result()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def accepted_async(self) -> None:
        """Await that the server has the request in its order, or that the request has failed."""
        await _settled(self._accepted)


async def _settled(future: concurrent.futures.Future[Any]) -> None:
    """Wait on the caller's loop until `future` is done, whatever its outcome."""
    # Not asyncio.wrap_future: it would cancel the request when one of its waiters is cancelled.
    loop = asyncio.get_running_loop()
    is_settled = asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the waiter's loop is closed: nobody waits any more
            loop.call_soon_threadsafe(is_settled.set)

    future.add_done_callback(wake)
    await is_settled.wait()
