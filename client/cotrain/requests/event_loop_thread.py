"""The thread that all of a client's network traffic runs on, under one event loop of its own.

So callers may be plain threads or any event loops, and a slow training loop delays no heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

from cotrain.errors import ClientClosed
from cotrain.transport.progress import PROGRESS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

ENDED = "the client was closed before this ended"


def check_not_forked(pid: int) -> None:
    """Raise ClientClosed where a client of process `pid` is used in another one.

    A fork copies a client's memory, and not the thread that does its work.
    """
    if pid != os.getpid():
        raise ClientClosed(
            "this client was made before this process was forked, and its thread stayed behind: make"
            " a new client here (a SamplingClient may be pickled, and so passed to a new process)"
        )


class BackgroundLoop:
    """A daemon thread that runs an event loop until `close`."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def is_here(self) -> bool:
        """Say whether this is the loop's own thread, which must wait for nothing that runs on it."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop, from any thread. Raises ClientClosed."""
        try:
            check_not_forked(self._pid)
        except ClientClosed:
            work.close()
            raise
        with self._closing:
            if self._is_closed:
                work.close()
                raise ClientClosed("this client was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop and block this thread for its result. Raises ClientClosed."""
        if self.is_here():
            work.close()
            raise RuntimeError("this call, from the client's own thread, would wait for itself")
        started = self.start(work)
        try:
            with PROGRESS.waiting(lambda: _name_of(work)):
                return started.result()
        except CancelledError:
            raise ClientClosed(ENDED) from None

    async def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on this loop and await its result on the caller's; cancelling reaches it.

        Raises ClientClosed.
        """
        started = self.start(work)
        try:
            with PROGRESS.waiting(lambda: _name_of(work)):
                return await asyncio.wrap_future(started)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if started.cancelled() and task is not None and not task.cancelling():
                raise ClientClosed(ENDED) from None
            raise

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, do `farewell`, and end the thread. A second call does nothing."""
        if self._pid != os.getpid():  # the thread that could close is the parent's
            return
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(cancel_the_rest_and(farewell), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _name_of(work: Coroutine[Any, Any, Any]) -> str:
    return getattr(work, "__name__", "the server").lstrip("_")


async def cancel_the_rest_and(farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel all tasks of this loop but the one that calls, wait until they have ended, and do `farewell`."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        # A task that is cancelled before it began never awaits what it was made for, and Python warns of that:
        # those of httpx that connect, for one.
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await farewell()
