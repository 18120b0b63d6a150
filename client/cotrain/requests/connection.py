"""Connection of one client to one server: its background thread, its transport and the server's limits.

All clients of one `ServiceClient` share a `Connection`. Other clients share one for each pair of address and key.
"""

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import NoReturn

import httpx
from typing_extensions import override

from cotrain.errors import NotFoundError, VersionMismatch
from cotrain.requests.background_loop import NOT_PICKLED, BackgroundLoop
from cotrain.requests.flow_control import Dispatch, InFlightLimit
from cotrain.settings import ClientSettings
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy, reader
from cotrain.version import PROTOCOL, __version__
from cotrain.wire.datums import Datum, is_unshifted
from cotrain.wire.sessions import ClientConfigRequest, ClientConfigResponse

log = logging.getLogger("cotrain")

POSTS_AT_ONCE = 32
"""Maximum number of samples that are sent at once, including retries while the server is busy."""
_POLLS_AT_ONCE = 500
"""Concurrent polls. Each holds a connection; the other half is for training and heartbeats."""


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
