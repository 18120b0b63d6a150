"""Read a request's body: never more bytes, values or depth than the limits, never a bomb.

Knows sizes and encodings; what the bytes mean is for `requests/`.

Count what a JSON body holds before it is parsed: a list is two bytes on the wire and 56 in memory.

In time and memory of the body's size whatever it holds, which no regular expression is for a string that
never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from starlette.requests import Request

from cotrain_server.errors import BodyTooLarge, BodyTooSlow, Unreadable, UnsupportedMediaType
from cotrain_server.parsing.parser import (
    BINARY_BYTE_WEIGHT,
    JSON_VALUE_WEIGHT,
    THREAD_ABOVE,
    Parser,
)
from cotrain_store.messages.ids import TenantId

MAX_JSON_DEPTH = 32


@dataclass(frozen=True)
class JsonLimits:
    """How much a JSON body may hold."""

    values: int
    """Numbers, texts, lists, objects, and names in objects."""
    containers: int
    """Lists and objects: each costs several times what a number does."""


#: What is read by the event loop itself: 20,000 values are a few milliseconds.
FEW = JsonLimits(values=20_000, containers=20_000)
#: SDKs send passes as protobuf. As JSON this is a million tokens with three inputs, or 10,000 datums.
MANY = JsonLimits(values=4 * 1024**2, containers=256 * 1024)
#: A chat of thousands of messages, or 256 prompts of tokens.
CHATS = JsonLimits(values=4 * 1024**2, containers=16 * 1024)

_BLOCK_BYTES = 1 << 20
_STEP_BY_SYMBOL = np.zeros(256, np.int8)
_STEP_BY_SYMBOL[[ord("["), ord("{")]] = 1
_STEP_BY_SYMBOL[[ord("]"), ord("}")]] = -1
_BEFORE_VALUE = np.zeros(256, np.bool_)
_BEFORE_VALUE[[ord("["), ord("{"), ord(","), ord(":")]] = True
_QUOTE = ord('"')


def count_json(body: bytes, limits: JsonLimits) -> int:
    """Count the values of a JSON body; where it is none, anything.

    Raises:
        BodyTooLarge: more than the limits.
        Unreadable: brackets nest deeper than MAX_JSON_DEPTH.
    """
    depth = quotes = containers = values = 0
    for block in _blocks(body):
        # First the escaped backslashes: then a quote behind one is escaped, and any other ends a string.
        symbols = np.frombuffer(block.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        if not len(symbols):
            continue
        quotes_before = quotes + np.cumsum(symbols == _QUOTE, dtype=np.int32)
        is_outside = quotes_before % 2 == 0
        steps = np.where(is_outside, _STEP_BY_SYMBOL[symbols], 0)
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > MAX_JSON_DEPTH:
            raise Unreadable(f"The JSON body is nested deeper than {MAX_JSON_DEPTH} levels.")
        containers += int(np.count_nonzero(steps > 0))
        values += int(np.count_nonzero(_BEFORE_VALUE[symbols] & is_outside))
        if containers > limits.containers:
            raise BodyTooLarge(
                f"The JSON body holds more than {limits.containers} lists and objects."
            )
        if values > limits.values:
            raise BodyTooLarge(f"The JSON body holds more than {limits.values} values.")
        depth, quotes = int(depths[-1]), int(quotes_before[-1])
    return values


def _blocks(body: bytes) -> Iterator[bytes]:
    """Cut a body where nothing is escaped: counts take several times the space of what they are of."""
    start = 0
    while start < len(body):
        end = start + _BLOCK_BYTES
        block = body[start:end]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            end += 1
            block = body[start:end]
        yield block
        start = end


#: An SDK gives up after 60 s; who sends a byte a second only wants to hold the connection.
RECEIVE_TIMEOUT_S = 60.0
#: A frame may ask the decoder for this much memory. The SDK's level 3 needs 2 MiB.
MAX_WINDOW_BYTES = 8 * 1024 * 1024
#: Of a body; tools that write several fill each with 64 KiB. An empty one is 9 bytes, and 2 µs.
MAX_FRAMES = 4096
#: What is smaller, compressed and not, waits for no other body.
SMALL_BYTES = 16 * 1024
#: `max_output_size` is no guard: it is ignored when a frame declares its size. So the input is fed
#: in slices. The smallest zstd block is 4 bytes and gives at most 128 KiB, hence a slice can
#: overshoot the limit by at most 16 MiB before it is refused.
SLICE_BYTES = 512


@dataclass(frozen=True)
class BodyReader:
    """Reads the bodies of one tenant's requests to one kind of endpoint."""

    parser: Parser
    tenant: TenantId
    limit_bytes: int
    json_limits: JsonLimits
    take: Callable[[int], None] = lambda _: None
    """Counts bytes as they come."""

    async def read(self, request: Request) -> bytes:
        """Read, decompress and measure the body of a request; `body_weight` tells its weight from then on.

        Raises:
            BodyTooLarge: it exceeds `limit_bytes` as sent or once decompressed, or `json_limits`.
            BodyTooSlow: it takes longer than RECEIVE_TIMEOUT_S to arrive.
            Unreadable: truncated or broken compression, or JSON nested too deep.
            UnsupportedMediaType: a content encoding other than zstd.
        """
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                body = await _receive(request, self.limit_bytes, self.take)
        except TimeoutError as late:
            raise BodyTooSlow from late
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding == "zstd":
            body = decompress_small(body) or await self._decompress(body)
            self.take(len(body))
        elif encoding != "identity":
            raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; use zstd.")
        weight = BINARY_BYTE_WEIGHT * len(body)
        if not is_protobuf(request):  # FastAPI takes other types for JSON, too, and none at all
            values = await self.parser.run(
                self.tenant, len(body), count_json, body, self.json_limits
            )
            weight = max(len(body), JSON_VALUE_WEIGHT * values)
        request.state.body_weight = weight
        return body

    async def _decompress(self, body: bytes) -> bytes:
        # However small it is: how large it becomes is not known yet.
        heavy = self.limit_bytes + THREAD_ABOVE
        return await self.parser.run(self.tenant, heavy, decompress, body, self.limit_bytes)


def body_weight(request: Request) -> int:
    """Say what a body that was read weighs, as `Parser` counts it."""
    weight: int = request.state.body_weight
    return weight


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


def decompress_small(body: bytes) -> bytes:
    """Decompress one zstd frame of SMALL_BYTES at most; empty where it is anything else."""
    if len(body) > SMALL_BYTES:
        return b""
    try:
        if zstandard.frame_content_size(body) > SMALL_BYTES:
            return b""
        decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        return decoder.decompress(body, max_output_size=SMALL_BYTES, allow_extra_data=False)
    except zstandard.ZstdError:
        return b""


def decompress(body: bytes, limit_bytes: int) -> bytes:
    """Decompress one or more zstd frames, giving up as soon as the limit is passed.

    Raises:
        BodyTooLarge: the frames declare or hold more than `limit_bytes`.
        Unreadable: not zstd, truncated, of more than MAX_FRAMES, or asking for more memory than
            MAX_WINDOW_BYTES.
    """
    try:
        return b"".join(_frames(body, limit_bytes))
    except zstandard.ZstdError as error:
        raise Unreadable("The request body is not readable zstd.") from error


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
    left_bytes, position, frames = limit_bytes, 0, 0
    while position < len(body):
        frames += 1
        if frames > MAX_FRAMES:
            raise Unreadable(f"The zstd body has more than {MAX_FRAMES} frames.")
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
