"""Connections: how many there may be, how long one may stay on which nothing is asked, how they are taken and whose request is next.

uvicorn waits for the rest of a request's head as long as there is a connection, and takes every one, so
that a client without a key could occupy all that this process may have.

Decides whose request is read next, when more come than can be answered. Pure: no socket, no clock.

A request costs some twenty times as much to answer as to receive. So what arrives is not parsed at once but round robin:
one request of each caller, then the next of each. A tenant that sends thousands waits behind itself alone.
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

#: Requests taken in one iteration of the event loop, of all callers. More of them make each longer, and a request takes many;
#: fewer cost throughput: what goes to Redis in one iteration goes there in one batch.
AT_ONCE = 16


class RequestQueue(Generic[Waiting]):
    """What waits, by caller. Each caller's own comes in the order in which it arrived."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Let `at_once` go at a time."""
        self._at_once = at_once
        self._by_caller: OrderedDict[Hashable, deque[Waiting]] = OrderedDict()  # who is next, first

    def __bool__(self) -> bool:
        """Tell whether anything waits."""
        return bool(self._by_caller)

    def wait(self, caller: Hashable, waiting: Waiting) -> None:
        """Put it behind all that its caller has here."""
        self._by_caller.setdefault(caller, deque()).append(waiting)

    def take(self) -> list[Waiting]:
        """Take the first of each caller, and so on."""
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
#: In which a client has to take what lies ready of an answer: one that reads slower than 4 KB/s, or not at all, would
#: hold one of its tenant's downloads open for as long as it likes.
TAKEN_TIMEOUT_S = 60.0
#: A poll holds one of them, and 30 KB.
MAX_CONNECTIONS = 20_000
#: Descriptors for all else: Redis, the spool, uploads, the files that are sent.
RESERVED_DESCRIPTORS = 256
#: New connections taken in one iteration of the event loop; the rest waits in the kernel, which holds BACKLOG.
#: asyncio tries as often, and logs and schedules as often, when no descriptor is left (CPython 3.11 to 3.13).
ACCEPTED_AT_ONCE = 64
BACKLOG = 4096
HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/metrics"})
#: Read at once where a request is to begin: what a connection holds while it is queued. Then as much as uvicorn lets lie.
_HEAD_BYTES, _BODY_BYTES = 16 * 1024, 64 * 1024
#: Those who ask for more than this host's health do not hold up who asks for that.
_HEALTH_CHECKS = (b"GET /healthz ", b"GET /readyz ", b"GET /metrics ")
#: Of what happens to thousands of connections in a second.
_LOGGED_EVERY_S = 10.0
_FULL = {
    "detail": "The server has too many connections; try again.",
    "code": "too_many_connections",
}


class LimitedH11Protocol(H11Protocol):
    """Closes a connection whose next request does not come to its end, or whose client does not take the answer.

    Between requests uvicorn's own `timeout_keep_alive` holds; the body is for the routes, but what
    still arrives of one when its request was answered is part of no request.
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
        """Begin to wait, unless there are too many."""
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
        """Read what has come: of a request that is being answered at once, else when the queue comes to it."""
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
            loop.call_soon(protocol._read)  # apart: an error in one is not the others'
        if queue:  # else the first that waits again calls this
            loop.call_soon(LimitedH11Protocol._read_next, queue)

    def _read(self) -> None:
        self._is_queued = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        try:
            super().handle_events()
        except Exception:
            self.transport.abort()  # as asyncio does where `data_received` raises
            raise
        if self._is_answering():
            _read_at_once(self.transport, _BODY_BYTES)
            self.table.asks(self)
            self._end_waiting()
        else:
            self._begin_to_wait()

    @override
    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there."""
        _read_at_once(self.transport, _HEAD_BYTES)
        super().on_response_complete()
        if not self._is_answering():
            self.table.waits(self)

    @override
    def pause_writing(self) -> None:
        """Wait for the client to take what was written, for so long."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        """Write on: the client took it."""
        super().resume_writing()
        self._end_untaken()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
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
    """Limit what is read at once; other loops than asyncio's own have no such limit."""
    if hasattr(transport, "max_size"):
        transport.max_size = max_bytes


def limited_protocol(
    most: int,
    proxies: Iterable[str],
    find_tenant: Callable[[bytes], TenantId | None] = lambda _: None,
) -> type[LimitedH11Protocol]:
    """Make the protocol of a process that holds `most` connections, half of them from one address.

    Not where many clients share one: this host's own, and that of a proxy (addresses or networks).
    `find_tenant` knows whose request it is by its first bytes, where it can: requests of each tenant are read round robin, and so are
    those of each address without one.
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
    return max_connections()


def max_connections() -> int:
    """Say how many connections this process may have: fewer than its descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(MAX_CONNECTIONS, limit - RESERVED_DESCRIPTORS), limit // 2)


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
