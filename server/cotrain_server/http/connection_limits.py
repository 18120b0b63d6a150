"""Limits of HTTP connections: their number, timeouts, accept rate, and the order of requests.

uvicorn waits for the rest of a request's head for the lifetime of a connection, and accepts every
connection. A client without a key could therefore occupy all connections of this process.

`RequestQueue` selects the next request when more arrive than can be answered. Pure: no socket, no
clock. Answering a request costs about twenty times as much as receiving it. Arriving requests are
therefore not parsed at once but round robin, one request of each caller per round. A tenant that
sends thousands of requests delays only its own.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Generic, TypeVar, cast

import structlog
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from cotrain_server.http.connection_table import Admission, ConnectionTable, subnet_of
from cotrain_server.http.middleware import request_id_of
from cotrain_store.listening import plain_address
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics

Waiting = TypeVar("Waiting")

#: Maximum number of requests read in one iteration of the event loop, over all callers. A larger
#: batch makes each iteration longer, and a request takes many iterations. A smaller batch costs
#: throughput, because all Redis commands of one iteration are sent in one batch.
AT_ONCE = 16


class RequestQueue(Generic[Waiting]):
    """Waiting requests by caller, first in, first out for each caller."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Create an empty queue that releases at most `at_once` entries per `take`."""
        self._at_once = at_once
        self._by_caller: OrderedDict[Hashable, deque[Waiting]] = OrderedDict()  # next caller first

    def __bool__(self) -> bool:
        """Return True if any request waits."""
        return bool(self._by_caller)

    def wait(self, caller: Hashable, waiting: Waiting) -> None:
        """Append a request to the queue of its caller."""
        self._by_caller.setdefault(caller, deque()).append(waiting)

    def take(self) -> list[Waiting]:
        """Return and remove up to `at_once` requests, round robin over the callers."""
        taken: list[Waiting] = []
        while self._by_caller and len(taken) < self._at_once:
            caller, waiting = next(iter(self._by_caller.items()))
            taken.append(waiting.popleft())
            if waiting:
                self._by_caller.move_to_end(caller)
            else:
                del self._by_caller[caller]
        return taken


log = structlog.get_logger()

#: From the first byte of a request's head to its last; from connecting to that first byte, too.
HEAD_TIMEOUT_S = 30.0
#: Time limit for a client to read the answer bytes that are ready. A client that reads slower than
#: 4 KB/s, or not at all, would otherwise hold one of its tenant's downloads open without limit.
TAKEN_TIMEOUT_S = 60.0
#: Each poll holds one connection, and 30 KB of memory.
MAX_CONNECTIONS = 20_000
#: Descriptors for all other uses: Redis, the spool, uploads, and files being sent.
RESERVED_DESCRIPTORS = 256
#: New connections accepted in one iteration of the event loop. The rest waits in the kernel, which
#: holds BACKLOG. If no descriptor is left, asyncio tries, logs and schedules this many times
#: (CPython 3.11 to 3.13).
ACCEPTED_AT_ONCE = 64
BACKLOG = 4096
HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/metrics"})
#: Maximum read size before a request begins: the memory of a queued connection. Afterwards the
#: second value applies, which is the amount that uvicorn buffers.
_HEAD_BYTES, _BODY_BYTES = 16 * 1024, 64 * 1024
#: Health checks have their own queue, so other requests cannot delay them.
_HEALTH_CHECKS = (b"GET /healthz ", b"GET /readyz ", b"GET /metrics ")
#: Interval between log lines of events that can happen to thousands of connections per second.
_LOGGED_EVERY_S = 10.0
_FULL = {
    "detail": "The server has too many connections; try again.",
    "code": "too_many_connections",
}


class LimitedH11Protocol(H11Protocol):
    """Protocol that closes a connection if its next request stays incomplete or its client does not
    read the answer.

    Between requests uvicorn's own `timeout_keep_alive` applies. The routes limit the body. Body
    bytes that arrive after their request was answered belong to no request.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    write_timeout_s = TAKEN_TIMEOUT_S
    table: ConnectionTable[LimitedH11Protocol] = ConnectionTable(MAX_CONNECTIONS, MAX_CONNECTIONS)
    queue: RequestQueue[LimitedH11Protocol] = RequestQueue()
    tenant_of: Callable[[bytes], TenantId | None] = staticmethod(lambda _: None)
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _is_queued = False
    _owner = ""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the head timeout, or refuse the connection if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        _read_at_once(transport, _HEAD_BYTES)
        if self.client:
            self.client = (plain_address(self.client[0]), self.client[1])
        address = self.client[0] if self.client else ""
        self._owner = subnet_of(address)
        admission, victim, reached = self.table.add(self, address)
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
    def handle_events(self) -> None:
        """Read received bytes at once if they belong to a request being answered, else queue the
        new request.
        """
        if self._is_answering():
            super().handle_events()
            return
        head, _ = self.conn.trailing_data
        if not head:
            super().handle_events()
        elif not self._is_queued:
            self._is_queued = True
            self.flow.pause_reading()
            self._unset_keepalive_if_required()
            if not self.queue:
                self.loop.call_soon(self._read_next, self.queue)
            self.queue.wait(self._caller(head), self)

    def _caller(self, head: bytes) -> Hashable:
        return self.tenant_of(head) or (self._owner, head.startswith(_HEALTH_CHECKS))

    @staticmethod
    def _read_next(queue: RequestQueue[LimitedH11Protocol]) -> None:
        loop = asyncio.get_running_loop()
        for protocol in queue.take():
            loop.call_soon(
                protocol._read
            )  # separate callbacks, so that an error in one does not affect the others
        if queue:  # otherwise the next request that is queued calls this
            loop.call_soon(LimitedH11Protocol._read_next, queue)

    def _read(self) -> None:
        self._is_queued = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        try:
            super().handle_events()
        except Exception:
            self.transport.abort()  # like asyncio if `data_received` raises
            raise
        if self._is_answering():
            _read_at_once(self.transport, _BODY_BYTES)
            self.table.asks(self)
            self._end_waiting()
        else:
            self._begin_to_wait()

    @override
    def on_response_complete(self) -> None:
        """Mark the connection as idle, unless its next request has already arrived."""
        _read_at_once(self.transport, _HEAD_BYTES)
        super().on_response_complete()
        if not self._is_answering():
            self.table.waits(self)

    @override
    def pause_writing(self) -> None:
        """Pause writing, and abort the connection if the client reads nothing for
        `write_timeout_s`.
        """
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        """Resume writing after the client has read."""
        super().resume_writing()
        self._end_untaken()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its timers."""
        self.table.remove(self)
        self._end_waiting()
        self._end_untaken()
        super().connection_lost(exc)

    def _end_untaken(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _begin_to_wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_queued and not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def _read_at_once(transport: asyncio.BaseTransport, max_bytes: int) -> None:
    """Limit the size of one read. Only asyncio's own event loop supports this."""
    if hasattr(transport, "max_size"):
        transport.max_size = max_bytes


def limited_protocol(
    most: int,
    proxies: Iterable[str],
    find_tenant: Callable[[bytes], TenantId | None] = lambda _: None,
) -> type[LimitedH11Protocol]:
    """Return the protocol class of a process that holds `most` connections, at most half of them
    from one address.

    Addresses shared by many clients have no limit of their own: this host's, and those of `proxies`
    (addresses or networks).

    `find_tenant` returns the tenant of a request by its first bytes, if it can.

    Requests are read round robin over tenants, and over addresses for requests without a tenant.
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

    class LimitedProtocol(LimitedH11Protocol):
        table = ConnectionTable[LimitedH11Protocol](most, most // 2, is_shared)
        queue = RequestQueue[LimitedH11Protocol]()
        tenant_of = staticmethod(find_tenant)

    return LimitedProtocol


def _network(name: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(name, strict=False)
    except ValueError:
        return None


def health_only(app: ASGIApp) -> ASGIApp:
    """Return an app that answers health checks, and any other request with 503 on a connection that
    closes.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_PATHS:
            await app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        headers = {"Retry-After": "1", "Connection": "close", "X-Request-Id": request_id}
        await JSONResponse({**_FULL, "request_id": request_id}, 503, headers)(scope, receive, send)

    return answer


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


def log_lost_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """Log the exhaustion of file descriptors at most every 10 s. asyncio pauses, and retries after
    1 s.
    """

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
