"""One client's way to one server: the key, the thread, the HTTP calls."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

from cotrain.background import BackgroundLoop
from cotrain.flow import Dispatch, Lane, Room
from cotrain.transport import Transport, read
from cotrain.types import ClientConfigRequest, ClientConfigResponse
from cotrain.version import __version__

if TYPE_CHECKING:
    import httpx

    from cotrain.settings import ClientSettings
    from cotrain.transport import RetryPolicy


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
        self.room = Room(self.loop.is_here)
        self._dispatch = Dispatch()
        self._asking = asyncio.Lock()
        self._config: ClientConfigResponse | None = None

    def lane(self) -> Lane:
        """Make the lane of one run."""
        return Lane(self._dispatch, self.transport.pause)

    async def config(self) -> ClientConfigResponse:
        """Ask, once, how the server wants to be talked to."""
        async with self._asking:
            if self._config is None:
                asked = ClientConfigRequest(sdk_version=f"cotrain-{__version__}")
                answer = await self.transport.post("client/config", asked)
                self._config = read(answer, ClientConfigResponse)
        return self._config


_shared: dict[tuple[int, ClientSettings], Connection] = {}
_sharing = threading.Lock()


def shared_connection(settings: ClientSettings) -> Connection:
    """Give the one connection that all clients unpickled in this process share.

    It lasts as long as the process: nobody could say when the last of them is done.
    """
    here = (os.getpid(), settings)  # a forked process inherits the connection, not its thread
    with _sharing:
        if here not in _shared:
            _shared[here] = Connection(settings)
        return _shared[here]
