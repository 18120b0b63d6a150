"""Background thread of a client: the event loop that runs all of its network traffic."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from cotrain.errors import ClientClosed
from cotrain.transport.progress import PROGRESS

T = TypeVar("T")

NOT_PICKLED = (
    "clients and futures belong to their process and cannot be pickled: pass results or checkpoint paths,"
    " or a SamplingClient, which can be pickled"
)
_ENDED = "the client was closed before this ended"


def check_not_forked(pid: int) -> None:
    """Raise ClientClosed if a client created in process `pid` is used in another process.

    A fork copies a client's memory, but not the thread that does its work.
    """
    if pid != os.getpid():
        raise ClientClosed(
            "this client was made before this process was forked, and its thread stayed behind: make"
            " a new client here (a SamplingClient may be pickled, and so passed to a new process)"
        )


class BackgroundLoop:
    """Daemon thread with the event loop that runs all network traffic of a client, until `close`.

    So callers may be plain threads or any event loops, and a slow training loop delays no heartbeat.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    def is_this_thread(self) -> bool:
        """Return True on the loop's own thread, which must not wait for work that runs on it."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop, from any thread. Raises ClientClosed."""
        try:
            check_not_forked(self._pid)
        except ClientClosed:
            work.close()
            raise
        with self._closing:
            if self.is_closed:
                work.close()
                raise ClientClosed("this client was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop and block this thread for its result. Raises ClientClosed."""
        if self.is_this_thread():
            work.close()
            raise RuntimeError("this call, from the client's own thread, would wait for itself")
        started = self.start(work)
        try:
            with PROGRESS.waiting(lambda: _name_of(work)):
                return started.result()
        except CancelledError:
            raise ClientClosed(_ENDED) from None

    async def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on this loop and await its result on the caller's; cancellation is passed on.

        Raises ClientClosed.
        """
        started = self.start(work)
        try:
            with PROGRESS.waiting(lambda: _name_of(work)):
                return await asyncio.wrap_future(started)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if started.cancelled() and task is not None and not task.cancelling():
                raise ClientClosed(_ENDED) from None
            raise

    def close(self, last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, run `last_work`, and end the thread. A second call does nothing."""
        if self._pid != os.getpid():  # a forked process inherits this object, but not the thread
            return
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(cancel_all_and_run(last_work), self._loop).result()
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


async def cancel_all_and_run(last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel all other tasks of this loop, wait until they have ended, and run `last_work`."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        # Let new tasks start first. A task cancelled before it starts never awaits its coroutine, and Python
        # warns about that; connecting tasks of httpx are an example.
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await last_work()
