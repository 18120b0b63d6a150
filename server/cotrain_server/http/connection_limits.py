"""Limits of HTTP connections: a timeout for the head of a request, and a maximum number.

uvicorn waits for the rest of a request's head for the lifetime of a connection, and accepts every
connection. Limits by client are those of a proxy in front (`docker/edge/haproxy.cfg`).
"""

import asyncio
import resource
import socket
from collections.abc import Iterable
from typing import cast

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from cotrain_store.listening import plain_address
from cotrain_store.monitoring import metrics

#: From the first byte of a request's head to its last; from connecting to that first byte, too.
HEAD_TIMEOUT_S = 30.0
#: Each poll holds one connection, and 30 KB of memory.
MAX_CONNECTIONS = 20_000
#: Descriptors for all other uses: Redis, the spool, uploads, and files being sent.
RESERVED_DESCRIPTORS = 256
#: New connections accepted in one iteration of the event loop, before one above the limit is closed.
#: The rest waits in the kernel, which holds BACKLOG.
ACCEPTED_AT_ONCE = 64
BACKLOG = 4096


class LimitedH11Protocol(H11Protocol):
    """Protocol that closes a connection above `max_connections`, or with an incomplete head.

    Between requests uvicorn's own `timeout_keep_alive` applies. The routes limit the body. Body
    bytes that arrive after their request was answered belong to no request.
    """

    max_connections = MAX_CONNECTIONS
    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the head timeout, or close the connection if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        if self.client:
            self.client = (plain_address(self.client[0]), self.client[1])
        if len(self.connections) > self.max_connections:
            metrics.CONNECTIONS_REFUSED.labels("process").inc()
            self.transport.abort()
        else:
            self._await_head()

    @override
    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and start the timeout if they complete no head."""
        super().data_received(data)
        if not self._is_answering():
            self._await_head()

    @override
    def handle_events(self) -> None:
        """Handle received bytes, and stop the timeout if they complete a head."""
        super().handle_events()
        if self._is_answering():
            self._end_timeout()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its timer."""
        self._end_timeout()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()

    def _end_timeout(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def limited_protocol(most: int) -> type[LimitedH11Protocol]:
    """Return the protocol class of a process that holds `most` connections."""
    return type("LimitedProtocol", (LimitedH11Protocol,), {"max_connections": most})


def allow_many_connections() -> int:
    """Raise the limit of file descriptors to the host's maximum. Shells set 1,024, and each poll
    holds one.

    Returns the number of descriptors available for connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max_connections()


def max_connections() -> int:
    """Return the maximum number of connections of this process, which is below its descriptor
    limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(MAX_CONNECTIONS, limit - RESERVED_DESCRIPTORS), limit // 2)


def listen_long(servers: Iterable[asyncio.Server]) -> None:
    """Set the kernel's accept queue to BACKLOG, although asyncio accepts only a few connections at
    once.
    """
    for server in servers:
        for listening in server.sockets:
            with socket.socket(fileno=socket.dup(listening.fileno())) as same:
                same.listen(BACKLOG)
