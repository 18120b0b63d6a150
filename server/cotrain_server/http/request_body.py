"""Read a request's body: never more than the limit, never deeper than the limit, never a bomb.

Knows sizes and encodings; what the bytes mean is for `requests/`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import zstandard

from cotrain_server.errors import BodyTooLarge, BodyTooSlow, Unreadable, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

#: Above this, work on a body leaves the event loop: other tenants' polls wait for it otherwise.
THREAD_ABOVE_BYTES = 256 * 1024
#: An SDK gives up after 60 s; who sends a byte a second only wants to hold the connection.
RECEIVE_TIMEOUT_S = 60.0
MAX_JSON_DEPTH = 32
#: A frame may ask the decoder for this much memory. The SDK's level 3 needs 2 MiB.
MAX_WINDOW_BYTES = 8 * 1024 * 1024
#: `max_output_size` is no guard: it is ignored when a frame declares its size. So the input is fed
#: in slices. The smallest zstd block is 4 bytes and gives at most 128 KiB, hence a slice can
#: overshoot the limit by at most 16 MiB before it is refused.
SLICE_BYTES = 512

_DEPTH_STEP = 1 << 20
_STEP_BY_SYMBOL = np.zeros(256, np.int8)
_STEP_BY_SYMBOL[[ord("["), ord("{")]] = 1
_STEP_BY_SYMBOL[[ord("]"), ord("}")]] = -1
_QUOTE = ord('"')


async def read_body(
    request: Request, limit_bytes: int, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read, decompress and depth-check the body of a request; `take` counts the bytes as they come.

    Raises:
        BodyTooLarge: it exceeds `limit_bytes` as sent or once decompressed.
        BodyTooSlow: it takes longer than RECEIVE_TIMEOUT_S to arrive.
        Unreadable: truncated or broken compression, or JSON nested too deep.
        UnsupportedMediaType: a content encoding other than zstd.
    """
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            body = await _receive(request, limit_bytes, take)
    except TimeoutError as late:
        raise BodyTooSlow from late
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "zstd":
        body = await off_event_loop(len(body), decompress, body, limit_bytes)
        take(len(body))
    elif encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; use zstd.")
    if is_json(request):
        await off_event_loop(len(body), refuse_deep_json, body)
    return body


async def json_body(request: Request) -> bytes:
    """Give the checked body of a request that says it is JSON; raises UnsupportedMediaType."""
    if not is_json(request):
        raise UnsupportedMediaType("Send application/json.")
    return await request.body()


def is_json(request: Request) -> bool:
    """Tell whether a request says that its body is JSON."""
    return _media_type(request) == "application/json"


def is_protobuf(request: Request) -> bool:
    """Tell whether a request says that its body is protobuf."""
    return _media_type(request) == "application/x-protobuf"


async def off_event_loop(
    size_bytes: int,
    work: Callable[Arguments, Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Answer:
    """Do some work on a body: here when it is small, in a thread when it is not."""
    if size_bytes <= THREAD_ABOVE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def decompress(body: bytes, limit_bytes: int) -> bytes:
    """Decompress one or more zstd frames, giving up as soon as the limit is passed.

    Raises:
        BodyTooLarge: the frames declare or hold more than `limit_bytes`.
        Unreadable: not zstd, truncated, or asking for more memory than MAX_WINDOW_BYTES.
    """
    try:
        return b"".join(_frames(body, limit_bytes))
    except zstandard.ZstdError as error:
        raise Unreadable("The request body is not readable zstd.") from error


def refuse_deep_json(body: bytes) -> None:
    """Raise Unreadable where brackets nest deeper than MAX_JSON_DEPTH.

    In time and memory of the body's size whatever it holds, which no regular expression is for a
    string that never ends.
    """
    # First the escaped backslashes: then a quote behind one is escaped, and any other ends a string.
    symbols = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    depth = quotes = 0
    for start in range(0, len(symbols), _DEPTH_STEP):  # piecewise: depths take four times the space
        chunk = symbols[start : start + _DEPTH_STEP]
        quotes_before = quotes + np.cumsum(chunk == _QUOTE, dtype=np.int32)
        steps = np.where(quotes_before % 2, 0, _STEP_BY_SYMBOL[chunk])
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > MAX_JSON_DEPTH:
            raise Unreadable(f"The JSON body is nested deeper than {MAX_JSON_DEPTH} levels.")
        depth, quotes = depths[-1], quotes_before[-1]


async def _receive(request: Request, limit_bytes: int, take: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyTooLarge(_too_large("Request body", limit_bytes))
    received = bytearray()
    async for chunk in request.stream():
        take(len(chunk))
        received += chunk
        if len(received) > limit_bytes:
            raise BodyTooLarge(_too_large("Request body", limit_bytes))
    return bytes(received)


def _frames(body: bytes, limit_bytes: int) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    left_bytes, position = limit_bytes, 0
    while position < len(body):
        frame = decoder.decompressobj()
        while not frame.eof:
            compressed = body[position : position + SLICE_BYTES]
            if not compressed:
                raise Unreadable("The zstd body is truncated.")
            plain = frame.decompress(compressed)
            position += len(compressed) - len(frame.unused_data)
            left_bytes -= len(plain)
            if left_bytes < 0:
                raise BodyTooLarge(_too_large("Decompressed body", limit_bytes))
            yield plain


def _too_large(subject: str, limit_bytes: int) -> str:
    return f"{subject} exceeds {limit_bytes / 1024**2:g} MiB."


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
