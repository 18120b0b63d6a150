"""Connections that occupy the server, over a real socket."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from typing_extensions import override
from uvicorn.server import ServerState

from cotrain_server.http.connection_limits import (
    ACCEPTED_AT_ONCE,
    MAX_HEAD_BYTES,
    RESERVED_DESCRIPTORS,
    JoinedWrites,
    LimitedProtocol,
    allow_many_connections,
    limited_protocol,
    listen_long,
    max_connections,
)
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import REGISTRIES
from tests.support.waiting import until

TIMEOUT_S = 0.2
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(2 * TIMEOUT_S)
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"late"})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    class Hurried(LimitedProtocol):
        head_timeout_s = TIMEOUT_S

    config = uvicorn.Config(answer_late, ws="none", log_config=None)
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hurried(config, state, {}), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
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
        writer.write(b"GET /")
        while not closed.done():
            writer.write(b"x")
            await asyncio.wait([closed], timeout=TIMEOUT_S / 10)
        # A byte sent after the end is answered with a reset, and the next one finds a broken pipe.
        assert isinstance(closed.exception(), ConnectionError) or closed.result() == b""


async def test_a_head_has_a_maximum_length() -> None:
    async with connected() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nLong: ".ljust(MAX_HEAD_BYTES + 1, b"x"))
        assert (await reader.read()).startswith(b"HTTP/1.1 400")


async def test_fields_after_a_body_have_a_maximum_length() -> None:
    head = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    async with connected() as (reader, writer):

        async def send() -> None:
            writer.write(head)
            for _ in range(100):
                writer.write(b"Long: " + b"x" * 16_384 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            await reader.readexactly(1)

        with pytest.raises(ConnectionError):
            await send()


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"late")).startswith(b"HTTP/1.1 200")


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


async def test_connections_above_the_limit_are_closed() -> None:
    """A place becomes free when its connection ends."""
    most, before = 4, refused()
    config = uvicorn.Config(answer_late, ws="none", log_config=None)
    state, protocol = ServerState(), limited_protocol(most)
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, state, {}), "127.0.0.1", 0, backlog=ACCEPTED_AT_ONCE
    )
    listen_long([server])
    async with server:
        address = server.sockets[0].getsockname()
        held = [await asyncio.open_connection(*address) for _ in range(most)]
        await until(lambda: len(state.connections) == most)
        held.append(await asyncio.open_connection(*address))
        with suppress(ConnectionError):
            assert await held[-1][0].read() == b""
        assert refused() - before == 1
        held.pop()[1].close()
        held.pop()[1].close()
        await until(lambda: len(state.connections) < most)
        held.append(await asyncio.open_connection(*address))
        held[-1][1].write(REQUEST)
        assert (await held[-1][0].readuntil(b"late")).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()
        await until(lambda: not state.connections)


def refused() -> float:
    name = "cotrain_connections_refused_total"
    return REGISTRIES[Source.API].get_sample_value(name, {"reason": "process"}) or 0.0


class Recorded(asyncio.Transport):
    """Transport that records its writes, and None for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes | None] = []

    @override
    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.writes.append(data)

    @override
    def close(self) -> None:
        self.writes.append(None)


async def test_head_and_body_of_an_answer_are_one_write() -> None:
    transport = Recorded()
    joined = JoinedWrites(transport, asyncio.get_running_loop())
    joined.write(b"head ")
    joined.write(b"body ")
    joined.write(b"more")
    assert transport.writes == [b"head body "]
    await asyncio.sleep(0)
    assert transport.writes == [b"head body ", b"more"]
    joined.write(b"end")
    joined.close()
    assert transport.writes[2:] == [b"end", None]
