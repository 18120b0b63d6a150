"""Connections that hold the server up, over a real socket."""

from __future__ import annotations

import asyncio
import resource
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import uvicorn
from uvicorn.server import ServerState

from cotrain_server.http.connection_limits import ImpatientProtocol, allow_many_connections

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

TIMEOUT_S = 0.2
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Hurried(ImpatientProtocol):
    head_timeout_s = TIMEOUT_S


async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(2 * TIMEOUT_S)
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"late"})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(answer_late, ws="none", log_level="error")
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hurried(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", REQUEST[:-1], b"POST /"])
async def test_a_head_that_does_not_come_to_its_end_ends_the_connection(sent: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_head_that_comes_byte_by_byte_has_no_more_time() -> None:
    async with connected() as (reader, writer):
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            writer.write(b"G")
            await asyncio.wait([closed], timeout=TIMEOUT_S / 10)
        # A byte that is sent after the end comes back as a reset.
        assert isinstance(closed.exception(), ConnectionResetError) or closed.result() == b""


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"late")).startswith(b"HTTP/1.1 200")


async def test_a_second_head_has_no_more_time_than_the_first() -> None:
    async with connected() as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"late")
        writer.write(REQUEST[:-1])
        assert await reader.read() == b""


async def test_a_body_nobody_waits_for_does_not_hold_a_connection() -> None:
    async with connected() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
        await reader.readuntil(b"late")
        writer.write(b"never all of it")
        assert await reader.read() == b""


def test_as_many_connections_are_allowed_as_the_host_grants() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
