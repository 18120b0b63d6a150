"""Connection of one client to one server: its background thread, its transport, and the polls for results.

All clients of one `ServiceClient` share a `Connection`. Other clients share one for each pair of address and key.
"""

import asyncio
import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NoReturn, TypeVar, get_args

import httpx
from pydantic import BaseModel
from typing_extensions import override

from cotrain.errors import (
    APIError,
    APIStatusError,
    Category,
    CheckpointNotFound,
    ClientClosed,
    ForeignAnswer,
    MalformedMessage,
    NotFoundError,
    RequestFailed,
    VersionMismatch,
)
from cotrain.requests.flow_control import Dispatch, InFlightLimit
from cotrain.settings import ClientSettings
from cotrain.transport.http import JSON, Transport
from cotrain.transport.progress import PROGRESS
from cotrain.transport.responses import RetryPolicy, read, reader
from cotrain.version import PROTOCOL, __version__
from cotrain.wire.codec import PROTOBUF, decode_pass_output
from cotrain.wire.datums import Datum, ForwardBackwardOutput, is_unshifted
from cotrain.wire.runs import FutureRetrieveRequest, UntypedAPIFuture
from cotrain.wire.sessions import ClientConfigRequest, ClientConfigResponse

log = logging.getLogger("cotrain")

T = TypeVar("T")
Result = TypeVar("Result", bound=BaseModel)

POSTS_AT_ONCE = 32
"""Maximum number of samples that are sent at once, including retries while the server is busy."""
_POLLS_AT_ONCE = 500
"""Concurrent polls. Each holds a connection; the other half is for training and heartbeats."""

_PENDING = 408
"""Status that the server sends at the end of a long poll while the result is pending."""
# Message of the server for a request that loads a missing checkpoint. The server sends no code for it,
# so a test compares the two texts.
NOT_FOUND = "Checkpoint not found."
# A poll is a long poll. If one is answered at once, this pause keeps the loop from spinning.
GAP_S = 0.05

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

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, run `farewell`, and end the thread. A second call does nothing."""
        if self._pid != os.getpid():  # a forked process inherits this object, but not the thread
            return
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(cancel_all_and_run(farewell), self._loop).result()
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


async def cancel_all_and_run(farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
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
        self.in_flight = InFlightLimit(self.loop.is_this_thread)
        self._limit_samples(_POLLS_AT_ONCE)
        self.dispatch = Dispatch()
        self._config_lock = asyncio.Lock()
        self._config: ClientConfigResponse | None = None
        self._has_warned = False

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

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
        async with self._config_lock:
            if self._config is None:
                self._config = config = await self._fetch_config()
                self.transport.compresses = config.proto_compress_fwdbwd
                self.dispatch.limit_bytes = config.fwdbwd_dispatch_bytes_semaphore_size
                self._limit_samples(config.sample_max_concurrent_requests)
        return self._config

    def _limit_samples(self, samples: int) -> None:
        self.sample_posts = asyncio.Semaphore(min(samples, POSTS_AT_ONCE))
        self.sample_polls = asyncio.Semaphore(min(samples, _POLLS_AT_ONCE))

    def warn_of_unshifted(self, data: Sequence[Datum]) -> None:
        """Log once if the targets of a datum equal its input."""
        if not self._has_warned and any(map(is_unshifted, data)):
            self._has_warned = True
            log.warning(
                "target_tokens equal the input: not shifted? The target of a token is the next one "
                "(model_input tokens[:-1], target_tokens tokens[1:])"
            )

    async def _fetch_config(self) -> ClientConfigResponse:
        was_known = self.transport.is_known
        request = ClientConfigRequest(sdk_version=f"cotrain-{__version__}")
        try:
            config = await self.transport.post("client/config", request, reader(ClientConfigResponse))
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
            atexit.register(_shared[here].loop.close, _shared[here].transport.close)
        return _shared[here]


# ---- Results ---------------------------------------------------------------------------------------------


async def call(transport: Transport, path: str, request: BaseModel, result: type[Result]) -> Result:
    """POST a request that the server queues, and wait for its result. Raises RequestFailed or APIError."""
    future = await transport.post(path, request, reader(UntypedAPIFuture))
    return await wait_for_result(transport, future.request_id, result)


async def wait_for_pass(transport: Transport, request_id: str) -> ForwardBackwardOutput:
    """Wait for the result of a forward or forward_backward. Raises RequestFailed or APIError."""
    return await wait_for_result(transport, request_id, ForwardBackwardOutput, decode_pass_output)


async def wait_for_result(
    transport: Transport, request_id: str, result: type[Result], decode: Callable[[bytes], Result] | None = None
) -> Result:
    """Wait for a result: JSON of this shape, or bytes for `decode`. Raises RequestFailed or APIError."""

    def parsed(response: httpx.Response) -> Result:
        _raise_failure(response, request_id)
        if decode and _is_binary(response):
            return decode(response.content)
        return read(response, result)

    request = FutureRetrieveRequest(request_id=request_id)
    patience = transport.patience()
    while True:
        try:
            return await transport.post_once("retrieve_future", request, parsed, accept=f"{PROTOBUF}, {JSON}")
        except RequestFailed:  # first, because CheckpointNotFound is an APIStatusError as well
            raise
        except APIStatusError as error:
            if not isinstance(error.body, dict) and transport.is_known:
                # Not a rejection by the server, which sends JSON. Repeating the poll is harmless.
                await patience.wait_out(ForeignAnswer(str(error)))
            elif error.status_code == _PENDING:
                patience.pending(error)
                await transport.sleep(GAP_S)
            else:
                await patience.wait_out(error)
        except APIError as error:
            await patience.wait_out(error)


def _is_binary(response: httpx.Response) -> bool:
    return response.is_success and response.headers.get("Content-Type", "").startswith(PROTOBUF)


def _raise_failure(response: httpx.Response, request_id: str) -> None:
    """Raise RequestFailed if a successful response reports the failure of the request."""
    if _is_binary(response) or not response.is_success:
        return
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise MalformedMessage("retrieve_future did not answer JSON") from error
    if not isinstance(answer, dict):
        raise MalformedMessage("retrieve_future did not answer a JSON object")
    if not {"error", "category"} <= answer.keys():
        return
    message, category = str(answer["error"]), answer["category"]
    if message == NOT_FOUND:
        raise CheckpointNotFound(message, request_id)
    raise RequestFailed(message, request_id, category if category in get_args(Category) else "unknown")
