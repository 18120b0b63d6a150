"""Connection of one client to one server: the key, the thread, the HTTP calls."""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import httpx
from typing_extensions import override

from cotrain.errors import ClientClosed, NotFoundError, VersionMismatch
from cotrain.requests.flow_control import Dispatch, InFlightLimit
from cotrain.requests.polling import SampleRequests
from cotrain.settings import ClientSettings
from cotrain.transport.http import Transport
from cotrain.transport.progress import PROGRESS
from cotrain.transport.responses import RetryPolicy, reader
from cotrain.version import PROTOCOL, __version__
from cotrain.wire.sessions import ClientConfigRequest, ClientConfigResponse

T = TypeVar("T")

ENDED = "the client was closed before this ended"


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
    """A daemon thread that runs an event loop until `close`.

    It runs all network traffic of a client. So callers may be plain threads or any event loops,
    and a slow training loop delays no heartbeat.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """True after `close` was called."""
        return self._is_closed

    def is_here(self) -> bool:
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
                raise ClientClosed(ENDED) from None
            raise

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, run `farewell`, and end the thread. A second call does nothing."""
        if self._pid != os.getpid():  # only the parent process has the thread
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
    """Cancel all other tasks of this loop, wait until they have ended, and run `farewell`."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        # Let new tasks start first. A task cancelled before it starts never awaits its coroutine, and Python
        # warns about that; connecting tasks of httpx are an example.
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await farewell()


class Connection:
    """Settings, loop and transport shared by all clients made from one `ServiceClient`."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        network: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.transport = Transport(settings.base_url, settings.api_key, network=network, policy=policy)
        self.loop = BackgroundLoop("cotrain-client")
        self.in_flight = InFlightLimit(self.loop.is_here)
        self.samples = SampleRequests(self.transport)
        self.dispatch = Dispatch()
        self._asking = asyncio.Lock()
        self._config: ClientConfigResponse | None = None

    @override
    def __repr__(self) -> str:
        return self.settings.shown_url + (", closed" if self.loop.is_closed else "")

    @property
    def known_config(self) -> ClientConfigResponse:
        """Configuration sent by the server; the protocol's defaults until it has been fetched."""
        return self._config or ClientConfigResponse()

    async def config(self) -> ClientConfigResponse:
        """Fetch the server's configuration once and apply its limits.

        Raises APIError, or VersionMismatch if the server uses another protocol version than this client.
        """
        async with self._asking:
            if self._config is None:
                self._config = config = await self._ask()
                self.transport.compresses = config.proto_compress_fwdbwd
                self.dispatch.limit_bytes = config.fwdbwd_dispatch_bytes_semaphore_size
                self.samples.limit(config.sample_max_concurrent_requests)
        return self._config

    async def _ask(self) -> ClientConfigResponse:
        was_known = self.transport.is_known
        asked = ClientConfigRequest(sdk_version=f"cotrain-{__version__}")
        try:
            config = await self.transport.post("client/config", asked, reader(ClientConfigResponse))
        except NotFoundError as error:  # every server of the protocol has this endpoint
            if was_known:
                raise
            message = f"{self.settings.base_url} is no cotrain server: is the base URL right?"
            raise NotFoundError(f"{message} ({error.message})", 404, error.body, request_id=error.request_id) from error
        if config.cotrain_protocol not in (None, PROTOCOL):
            raise VersionMismatch(
                f"the server is cotrain {config.cotrain_version} and speaks protocol"
                f" {config.cotrain_protocol}, this client is cotrain {__version__} and speaks"
                f" {PROTOCOL}: install cotrain {config.cotrain_version} here"
            )
        return config


_shared: dict[tuple[int, ClientSettings], Connection] = {}
_sharing = threading.Lock()


def shared_connection(settings: ClientSettings) -> Connection:
    """Return the connection shared by all clients with these settings that belong to no ServiceClient.

    It is closed when the process ends: its clients have no `close`, so its last use is unknown.
    """
    here = (os.getpid(), settings)  # a forked process inherits the connection, not its thread
    with _sharing:
        if here not in _shared:
            _shared[here] = Connection(settings)
            atexit.register(_close, os.getpid(), _shared[here])
        return _shared[here]


def _close(pid: int, connection: Connection) -> None:
    if pid == os.getpid():  # a forked process inherits this handler, but not the thread
        connection.loop.close(connection.transport.close)
