"""Connections that occupy the server, over a real socket.

Order in which requests are read.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cotrain_server.http import connection_limits
from cotrain_server.http.connection_limits import (
    ACCEPTED_AT_ONCE,
    AT_ONCE,
    RESERVED_DESCRIPTORS,
    TAKEN_TIMEOUT_S,
    LimitedH11Protocol,
    RequestQueue,
    allow_many_connections,
    limited_protocol,
    listen_long,
    log_lost_accepts,
    max_connections,
)
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import REGISTRIES
from tests.support.waiting import until

TIMEOUT_S = 0.2
CHUNK_BYTES, CHUNKS = 2**20, 64
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(2 * TIMEOUT_S)
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"late"})


@asynccontextmanager
async def connected(
    app: ASGIApp = answer_late, write_timeout_s: float = TAKEN_TIMEOUT_S
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    class Hurried(LimitedH11Protocol):
        head_timeout_s = TIMEOUT_S
        queue = RequestQueue()  # of this event loop

    Hurried.write_timeout_s = write_timeout_s
    config = uvicorn.Config(app, ws="none", log_config=None)
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hurried(config, state, {}), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, limit=CHUNK_BYTES)
        yield reader, writer
        writer.close()
        with suppress(ConnectionError):  # a byte sent after the end is answered with a reset
            await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", REQUEST[:-1], b"POST /"])
async def test_an_incomplete_head_ends_the_connection(sent: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_head_sent_byte_by_byte_gets_no_more_time() -> None:
    async with connected() as (reader, writer):
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            writer.write(b"G")
            await asyncio.wait([closed], timeout=TIMEOUT_S / 10)
        # A byte sent after the end is answered with a reset, and the next one finds a broken pipe.
        assert isinstance(closed.exception(), ConnectionError) or closed.result() == b""


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"late")).startswith(b"HTTP/1.1 200")


class Sending:
    """Application that sends CHUNKS, and sets `is_over` at the end of a request."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % (CHUNK_BYTES * CHUNKS))]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for left in reversed(range(CHUNKS)):
                body = bytes(CHUNK_BYTES)
                await send({"type": "http.response.body", "body": body, "more_body": left > 0})
        finally:
            self.is_over.set()


async def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    app = Sending()
    async with connected(app, write_timeout_s=TIMEOUT_S) as (reader, writer):
        writer.write(REQUEST)
        await app.is_over.wait()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(CHUNK_BYTES * CHUNKS)


async def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    app = Sending()
    async with connected(app, write_timeout_s=3.0) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(CHUNKS):  # longer in total than one write may wait
            await asyncio.sleep(0.06)
            await reader.readexactly(CHUNK_BYTES)
        await app.is_over.wait()


async def test_a_second_head_gets_no_more_time_than_the_first() -> None:
    async with connected() as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"late")
        writer.write(REQUEST[:-1])
        assert await reader.read() == b""


async def test_an_unread_body_does_not_hold_a_connection() -> None:
    async with connected() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
        await reader.readuntil(b"late")
        writer.write(b"never all of it")
        assert await reader.read() == b""


def test_the_connection_limit_follows_the_descriptor_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert max_connections() == 1024 - RESERVED_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- Connection limit -------------------------------------------------------------------------------

LIMITS = 8
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Held:
    """Server that answers health checks at once, and other requests when `let` is set."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.asked = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/healthz":
            self.asked.release()
            await self.let.wait()
        await answer(send)


class Noting:
    """Server that records the path of each request, and answers at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        await answer(send)


async def answer(send: Send) -> None:
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"here"})


@asynccontextmanager
async def limited(
    app: Held | Noting,
    most: int = LIMITS,
    find_tenant: Callable[[bytes], TenantId | None] = lambda _: None,
) -> AsyncIterator[asyncio.Server]:
    config = uvicorn.Config(app, ws="none", log_config=None)
    state, loop = ServerState(), asyncio.get_running_loop()
    protocol = limited_protocol(most, (), find_tenant)
    server = await loop.create_server(
        lambda: protocol(config, state, {}), "127.0.0.1", 0, backlog=ACCEPTED_AT_ONCE
    )
    listen_long([server])
    async with server:
        yield server
        if isinstance(app, Held):
            app.let.set()
        await until(lambda: not len(protocol.table))  # the client has closed them


async def connect(server: asyncio.Server, *, count: int = 1) -> list[Streams]:
    address = server.sockets[0].getsockname()
    return [await asyncio.open_connection(*address) for _ in range(count)]


async def ask(streams: Streams, request: bytes) -> bytes:
    streams[1].write(request)
    return await streams[0].readuntil(b"\r\n")


def refused() -> float:
    name = "cotrain_connections_refused_total"
    return REGISTRIES[Source.API].get_sample_value(name, {"reason": "process"}) or 0.0


async def test_a_flood_of_silent_connections_replaces_its_own_oldest_ones() -> None:
    app, before = Held(), refused()
    async with limited(app) as server:
        flood = await connect(server, count=5 * LIMITS)
        [ordinary] = await connect(server)
        assert await ask(ordinary, HEALTH) == b"HTTP/1.1 200 OK\r\n"
        closed = [reader for reader, _ in flood if reader.at_eof() or reader.exception()]
        assert len(closed) == 4 * LIMITS + 1
        assert refused() - before == len(closed)
        for _, writer in [*flood, ordinary]:
            writer.close()


async def test_health_checks_are_answered_while_every_connection_is_busy() -> None:
    app = Held()
    async with limited(app) as server:
        polls = await connect(server, count=LIMITS)
        for _, writer in polls:
            writer.write(REQUEST)
        for _ in polls:
            await app.asked.acquire()
        check, other = await connect(server, count=2)
        assert await ask(check, HEALTH) == b"HTTP/1.1 200 OK\r\n"
        assert await ask(other, REQUEST) == b"HTTP/1.1 503 Service Unavailable\r\n"
        said = await other[0].read()
        assert b"retry-after: 1" in said
        assert b"too_many_connections" in said
        assert b"x-request-id: " in said.lower()
        app.let.set()
        for streams in polls:
            assert (await streams[0].readuntil(b"here")).startswith(b"HTTP/1.1 200")
        # Open again at once: the place of an answered connection is free.
        [late] = await connect(server)
        assert await ask(late, REQUEST) == b"HTTP/1.1 200 OK\r\n"
        for _, writer in [*polls, check, other, late]:
            writer.close()


async def test_no_free_descriptor_is_logged_in_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured: by the end of the flood, asyncio had logged 136,000 tracebacks. It listened again
    two minutes later.
    """
    lines: list[str] = []
    monkeypatch.setattr(connection_limits, "_logged_at", {})
    monkeypatch.setattr(connection_limits.log, "warning", lambda event, **_: lines.append(event))
    loop = asyncio.get_running_loop()
    log_lost_accepts(loop)
    timers = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal timers
        timers += 1
        return later(*args, **kwargs)  # type: ignore[arg-type]

    later = loop.call_later
    app = Held()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with limited(app) as server:
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        ordinary = await asyncio.open_connection(sock=client)
        assert await ask(ordinary, HEALTH) == b"HTTP/1.1 200 OK\r\n"
        waiting = socket.socket()
        waiting.setblocking(False)
        monkeypatch.setattr(loop, "call_later", counted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # none is free
        try:
            await loop.sock_connect(waiting, server.sockets[0].getsockname())
            for _ in range(1000):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert lines == ["accept_paused"]
        assert timers <= ACCEPTED_AT_ONCE
        assert not caplog.records
        # Accepted once a descriptor is free again.
        late = await asyncio.open_connection(sock=waiting)
        assert await ask(late, HEALTH) == b"HTTP/1.1 200 OK\r\n"
        for _, writer in (ordinary, late):
            writer.close()
    loop.set_exception_handler(None)


# ---- Order of requests ------------------------------------------------------------------------------

FLOOD, KEY = 400, b"tml-known"


def tenant_in(head: bytes) -> TenantId | None:
    return TenantId("a") if KEY in head else None


@pytest.mark.parametrize(
    ("path", "header"),
    [("/ordinary", b"X-Api-Key: " + KEY + b"\r\n"), ("/healthz", b"")],
    ids=["tenant", "health"],
)
async def test_a_flood_of_requests_waits_only_behind_itself(path: str, header: bytes) -> None:
    app = Noting()
    async with limited(app, 2 * FLOOD, tenant_in) as server:
        flood = await connect(server, count=FLOOD)
        [ordinary] = await connect(server)
        for streams in flood:
            streams[1].write(b"GET /flood HTTP/1.1\r\nHost: here\r\n\r\n")
        request = f"GET {path} HTTP/1.1\r\nHost: here\r\n".encode() + header + b"\r\n"
        assert await ask(ordinary, request) == b"HTTP/1.1 200 OK\r\n"
        assert app.asked.index(path) <= 3 * AT_ONCE
        await ordinary[0].readuntil(b"here")
        before = len(app.asked)
        assert await ask(ordinary, request) == b"HTTP/1.1 200 OK\r\n"  # on the same connection
        assert app.asked[before:].index(path) <= 5 * AT_ONCE
        for streams in flood:
            assert (await streams[0].readuntil(b"here")).startswith(b"HTTP/1.1 200")
        assert len(app.asked) == FLOOD + 2
        for _, writer in [*flood, ordinary]:
            writer.close()


async def test_pipelined_requests_wait_for_their_turns_too() -> None:
    app = Noting()
    async with limited(app, LIMITS, tenant_in) as server:
        [flood, ordinary] = await connect(server, count=2)
        flood[1].write(b"GET /flood HTTP/1.1\r\nHost: here\r\n\r\n" * FLOOD)
        assert await ask(ordinary, HEALTH) == b"HTTP/1.1 200 OK\r\n"
        assert app.asked.index("/healthz") <= AT_ONCE
        for _ in range(FLOOD):
            await flood[0].readuntil(b"here")
        for _, writer in (flood, ordinary):
            writer.close()


async def test_a_connection_that_fails_while_it_is_read_is_closed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse = H11Protocol.handle_events

    def broken(self: H11Protocol) -> None:
        if b"/broken" in self.conn.trailing_data[0]:
            raise ValueError
        parse(self)

    monkeypatch.setattr(H11Protocol, "handle_events", broken)
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    async with limited(Noting()) as server:
        [first, second] = await connect(server, count=2)
        first[1].write(b"GET /broken HTTP/1.1\r\nHost: here\r\n\r\n")
        second[1].write(HEALTH)
        assert await second[0].readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        with suppress(ConnectionError):
            assert await first[0].read() == b""
        for _, writer in (first, second):
            writer.close()
    loop.set_exception_handler(None)
    assert [type(failure) for failure in failures] == [ValueError]


A, B = TenantId("a"), TenantId("b")


def test_one_request_waits_for_at_most_one_of_each_other_caller() -> None:
    queue = RequestQueue[str](at_once=4)
    for number in range(1_000):
        queue.wait("flood", f"flood {number}")
    queue.wait(A, "a 0")
    queue.wait(B, "b 0")
    queue.wait(B, "b 1")
    assert queue.take() == ["flood 0", "a 0", "b 0", "flood 1"]
    assert queue.take() == ["b 1", "flood 2", "flood 3", "flood 4"]


def test_a_served_caller_goes_behind_all_others() -> None:
    queue = RequestQueue[str](at_once=1)
    for caller in ("flood", "flood", "other"):
        queue.wait(caller, caller)
    assert queue.take() == ["flood"]
    queue.wait("third", "third")
    assert [queue.take() for _ in range(3)] == [["other"], ["flood"], ["third"]]
    assert not queue


def test_every_queued_request_is_taken_once_in_order() -> None:
    queue = RequestQueue[int](at_once=3)
    for number in range(100):
        queue.wait(number % 7, number)
    taken = []
    while queue:
        taken += queue.take()
    assert sorted(taken) == list(range(100))
    of_one = [number for number in taken if number % 7 == 2]
    assert of_one == sorted(of_one)
