"""Limits of HTTP connections: a timeout for the head of a request, and a maximum number.

uvicorn waits for the rest of a request's head for the lifetime of a connection, and accepts every
connection. Limits by client are those of a proxy in front (`docker/edge/haproxy.cfg`).

`JoinedWrites` also sends the head of an answer together with the start of its body.
"""

import asyncio
import resource
import socket
from collections.abc import Iterable
from typing import cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cotrain_store.monitoring import metrics
from cotrain_store.process_start import plain_address

#: From the first byte of a request's head to its last; from connecting to that first byte, too.
HEAD_TIMEOUT_S = 30.0
#: Longest head, or fields after a body, that arrive in several parts.
MAX_HEAD_BYTES = 64 * 1024
#: Each poll holds one connection, and 30 KB of memory.
MAX_CONNECTIONS = 20_000
#: Descriptors for all other uses: Redis, the spool, uploads, and files being sent.
RESERVED_DESCRIPTORS = 256
#: New connections accepted in one iteration of the event loop, before one above the limit is closed.
#: The rest waits in the kernel, which holds BACKLOG.
ACCEPTED_AT_ONCE = 16
#: Bytes read from one connection in one iteration of the event loop. Less takes more time for each byte, and more
#: delays the others.
READ_AT_ONCE = 128 * 1024
BACKLOG = 4096


class JoinedWrites:
    """Transport of one connection that delays a write until the next one, or until the event loop continues.

    uvicorn writes the head and the body of an answer one after the other. Each call of the kernel took a twentieth of the
    processor time of a small request, and each part wakes the client.
    """

    __slots__ = ("_loop", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._unsent = transport, loop, b""

    def is_closing(self) -> bool:
        """Return True if the connection is closed or will be."""
        return self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def write(self, data: bytes) -> None:
        """Write some bytes, at the latest in the next iteration of the event loop."""
        if self._unsent:
            self._unsent += data
            self._flush()
        else:
            self._unsent = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Write the delayed bytes, and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            self._transport.write(unsent)


class LimitedProtocol(HttpToolsProtocol):
    """Protocol that closes a connection above `max_connections`, or with a slow or long head.

    Between requests uvicorn's own `timeout_keep_alive` applies. The routes limit the body. Body
    bytes that arrive after their request was answered belong to no request.
    """

    max_connections = MAX_CONNECTIONS
    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None
    _is_head = True  # the next bytes belong to the head of a request
    _has_advanced = False  # the bytes received last ended a head, or belonged to a body
    _partial_bytes = 0  # received since a head ended, or since bytes belonged to a body

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the head timeout, or close the connection if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport = cast("asyncio.Transport", JoinedWrites(self.transport, self.loop))
        transport.max_size = READ_AT_ONCE  # type: ignore[attr-defined]  # of asyncio's transports; 256 KB by default
        if self.client:
            self.client = (plain_address(self.client[0]), self.client[1])
        if len(self.connections) > self.max_connections:
            metrics.CONNECTIONS_REFUSED.labels("process").inc()
            self.transport.abort()
        else:
            self._await_head()

    @override
    def data_received(self, data: bytes) -> None:
        """Parse received bytes. A head or a trailer without an end has a maximum length and a timeout."""
        self._has_advanced = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        is_answering = self._is_answering()
        self._partial_bytes = 0 if self._has_advanced else self._partial_bytes + len(data)
        if self._partial_bytes > MAX_HEAD_BYTES:
            if self._is_head and not is_answering:
                self.send_400_response(f"The head of a request exceeds {MAX_HEAD_BYTES} bytes.")
            else:
                self.transport.abort()
        elif not is_answering:
            self._await_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of a head. Fields after a body are dropped."""
        if self._is_head:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        """Stop the timeout, and begin the request."""
        self._is_head, self._has_advanced = False, True
        self._end_timeout()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Reset the count of bytes that end no head and belong to no body."""
        self._has_advanced = True

    @override
    def on_body(self, body: bytes) -> None:
        """Store bytes of a body."""
        self._has_advanced = True
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        """End the body; the next bytes are another head."""
        self._is_head, self._has_advanced = True, True
        super().on_message_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its timer."""
        self._end_timeout()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._close_idle)

    def _close_idle(self) -> None:
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


def limited_protocol(max_connections: int) -> type[LimitedProtocol]:
    """Return the protocol class of a process that holds `max_connections` connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"max_connections": max_connections})


def allow_many_connections() -> int:
    """Raise the limit of file descriptors to the host's maximum. Shells set 1,024, and each poll holds one.

    Returns the number of descriptors available for connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max_connections()


def max_connections() -> int:
    """Return the maximum number of connections of this process, which is below its descriptor limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(MAX_CONNECTIONS, limit - RESERVED_DESCRIPTORS), limit // 2)


def listen_long(servers: Iterable[asyncio.Server]) -> None:
    """Set the kernel's accept queue to BACKLOG, although asyncio accepts only a few connections at once."""
    for server in servers:
        for listening in server.sockets:
            with socket.socket(fileno=socket.dup(listening.fileno())) as same:
                same.listen(BACKLOG)
