"""One client's way to one server: the key, the thread, the HTTP calls."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from cotrain.errors import NotFoundError, VersionMismatch
from cotrain.requests.event_loop_thread import BackgroundLoop
from cotrain.requests.flow_control import Dispatch, InFlightLimit, SendQueue
from cotrain.requests.sample_requests import SampleRequests
from cotrain.transport.http import Transport, can_compress, reader
from cotrain.version import PROTOCOL, __version__
from cotrain.wire.sessions import ClientConfigRequest, ClientConfigResponse

if TYPE_CHECKING:
    import httpx

    from cotrain.settings import ClientSettings
    from cotrain.transport.http import RetryPolicy


class Connection:
    """What every client made from one `ServiceClient` shares."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        network: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.transport = Transport(
            settings.base_url, settings.api_key, network=network, policy=policy
        )
        self.loop = BackgroundLoop("cotrain-client")
        self.in_flight = InFlightLimit(self.loop.is_here)
        self.samples = SampleRequests(self.transport)
        self._dispatch = Dispatch()
        self._asking = asyncio.Lock()
        self._config: ClientConfigResponse | None = None

    @override
    def __repr__(self) -> str:
        return self.settings.shown_url + (", closed" if self.loop.is_closed else "")

    @property
    def known_config(self) -> ClientConfigResponse:
        """What the server has message of how to talk to it; the protocol's defaults until it was asked."""
        return self._config or ClientConfigResponse()

    def send_queue(self) -> SendQueue:
        """Make the send queue of one run."""
        return SendQueue(self._dispatch, self.transport.pause)

    async def config(self) -> ClientConfigResponse:
        """Ask, once, how the server wants to be talked to.

        Raises APIError, or VersionMismatch where it speaks another protocol than this client.
        """
        async with self._asking:
            if self._config is None:
                self._config = config = await self._ask()
                self.transport.compresses = config.proto_compress_fwdbwd and can_compress()
                self._dispatch.limit_bytes = config.fwdbwd_dispatch_bytes_semaphore_size
                self.samples.limit(config.sample_max_concurrent_requests)
        return self._config

    async def _ask(self) -> ClientConfigResponse:
        was_known = self.transport.is_known
        asked = ClientConfigRequest(sdk_version=f"cotrain-{__version__}")
        try:
            config = await self.transport.post("client/config", asked, reader(ClientConfigResponse))
        except NotFoundError as error:  # every server of the protocol has it
            if was_known:
                raise
            message = f"{self.settings.base_url} is no cotrain server: is the base URL right?"
            raise NotFoundError(
                f"{message} ({error.message})", 404, error.body, request_id=error.request_id
            ) from error
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
    """Give the one connection that all clients of these settings without a service share here.

    It is closed when the process ends: its clients have no `close`, so its last use is not known.
    """
    here = (os.getpid(), settings)  # a forked process inherits the connection, not its thread
    with _sharing:
        if here not in _shared:
            _shared[here] = Connection(settings)
            atexit.register(_close, os.getpid(), _shared[here])
        return _shared[here]


def _close(pid: int, connection: Connection) -> None:
    if pid == os.getpid():  # a forked process has the handler, and no thread that could close
        connection.loop.close(connection.transport.close)
