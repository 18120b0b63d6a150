"""Connections: how many there may be, how long one may stay on which nothing is asked, and how they are taken.

uvicorn waits for the rest of a request's head as long as there is a connection, and takes every one, so
that a client without a key could occupy all that this process may have.
"""

from __future__ import annotations

import resource
import socket
import time
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, cast

import structlog
from starlette.responses import JSONResponse
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from cotrain_server.http.connection_table import Admission, ConnectionTable
from cotrain_server.http.request_id import request_id_of
from cotrain_store.monitoring import metrics

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable
    from ipaddress import IPv4Network, IPv6Network

    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

log = structlog.get_logger()

#: From the first byte of a request's head to its last; from connecting to that first byte, too.
HEAD_TIMEOUT_S = 30.0
#: A poll holds one of them, and 30 KB.
MOST_CONNECTIONS = 20_000
#: Descriptors for all else: Redis, the spool, uploads, the files that are sent.
RESERVED_DESCRIPTORS = 256
#: New connections taken in one turn of the event loop; the rest waits in the kernel, which holds BACKLOG.
#: asyncio tries as often, and logs and schedules as often, when no descriptor is left (CPython 3.11 to 3.13).
ACCEPTED_AT_ONCE = 64
BACKLOG = 4096
HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/metrics"})
#: Of what happens to thousands of connections in a second.
_LOGGED_EVERY_S = 10.0
_FULL = {
    "detail": "The server has too many connections; try again.",
    "code": "too_many_connections",
}


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose next request has begun and does not come to its end.

    Between requests uvicorn's own `timeout_keep_alive` holds; the body is for the routes, but what
    still arrives of one when its request was answered is part of no request.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    table: ConnectionTable[ImpatientProtocol] = ConnectionTable(MOST_CONNECTIONS, MOST_CONNECTIONS)
    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait, unless there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        admission, victim, reached = self.table.add(self, self.client[0] if self.client else "")
        if victim is not None:
            victim.transport.abort()
        if reached is not None:
            metrics.CONNECTIONS_REFUSED.labels(reached).inc()
            _log_sometimes("connections_full", connections=len(self.table))
        if admission is Admission.NOTHING:
            self.transport.abort()
            return
        if admission is Admission.HEALTH_ONLY:
            self.app = health_only(self.app)
        self._begin_to_wait()

    @override
    def data_received(self, data: bytes) -> None:
        """Wait on while no request is there to answer."""
        super().data_received(data)
        if self._is_answering():
            self.table.asks(self)
            self._end_waiting()
        else:
            self._begin_to_wait()

    @override
    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there."""
        super().on_response_complete()
        if not self._is_answering():
            self.table.waits(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.table.remove(self)
        self._end_waiting()
        super().connection_lost(exc)

    def _begin_to_wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def limited_protocol(most: int, proxies: Iterable[str]) -> type[ImpatientProtocol]:
    """Make the protocol of a process that holds `most` connections, half of them from one address.

    Not where many clients share one: this host's own, and that of a proxy (addresses or networks).
    """
    named = frozenset(proxies)
    networks = [network for name in named if (network := _network(name))]

    def is_shared(address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return True
        is_proxy = "*" in named or any(parsed in network for network in networks)
        return is_proxy or parsed.is_loopback

    class LimitedProtocol(ImpatientProtocol):
        table = ConnectionTable[ImpatientProtocol](most, most // 2, is_shared)

    return LimitedProtocol


def _network(name: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(name, strict=False)
    except ValueError:
        return None


def health_only(app: ASGIApp) -> ASGIApp:
    """Answer health checks, and 503 to all else, on a connection that is closed then."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        headers = {"Retry-After": "1", "Connection": "close", "X-Request-Id": request_id}
        await JSONResponse({**_FULL, "request_id": request_id}, 503, headers)(scope, receive, send)

    return answer


def allow_many_connections() -> int:
    """Take as many file descriptors as the host grants: shells give 1,024, and a poll holds one.

    Returns how many of them connections may have.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most_connections()


def most_connections() -> int:
    """Say how many connections this process may have: fewer than its descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(min(MOST_CONNECTIONS, limit - RESERVED_DESCRIPTORS), limit // 2)


def listen_long(servers: Iterable[asyncio.Server]) -> None:
    """Have the kernel hold BACKLOG connections that are not taken yet, and asyncio take a few at once."""
    for server in servers:
        for listening in server.sockets:
            with socket.socket(fileno=socket.dup(listening.fileno())) as same:
                same.listen(BACKLOG)


def log_lost_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """Say in one line now and then that no descriptor is left; asyncio pauses, and tries again after 1 s."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") == "socket.accept() out of system resource":
            _log_sometimes("accept_paused", reason=str(context.get("exception")))
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _log_sometimes(
    event: str, clock: Callable[[], float] = time.monotonic, **facts: object
) -> None:
    now = clock()
    if now - _logged_at.get(event, -_LOGGED_EVERY_S) >= _LOGGED_EVERY_S:
        _logged_at[event] = now
        log.warning(event, **facts)


_logged_at: dict[str, float] = {}
