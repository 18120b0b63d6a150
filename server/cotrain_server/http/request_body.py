"""Reader of request bodies within limits on bytes, values and nesting depth, safe against compression bombs.

It handles sizes and encodings. `requests/` interprets the content.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from starlette.requests import Request
from typing_extensions import override

from cotrain_server.errors import BodyTooLarge, Unreadable
from cotrain_server.parser import JSON_VALUE_WEIGHT, THREAD_ABOVE, Parser
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId

#: An SDK stops waiting after 60 s. A client that sends one byte per second only occupies the connection.
RECEIVE_TIMEOUT_S = 60.0
#: Size from which received chunks are no longer gathered in one buffer.
_GATHERED_BYTES = 64 * 1024
#: Maximum decoder memory that a frame may request. The SDK's level 3 needs 2 MiB.
MAX_WINDOW_BYTES = 8 * 1024 * 1024
#: Maximum number of frames of a body. Tools that write several frames put 64 KiB into each. An
#: empty frame takes 9 bytes and 2 µs.
MAX_FRAMES = 4096
#: A body of at most this size, compressed and decompressed, waits for no other body.
SMALL_BYTES = 16 * 1024
#: `max_output_size` is no protection: it is ignored when a frame declares its size. So the input is
#: decompressed in slices. The smallest zstd block is 4 bytes and expands to at most 128 KiB. A
#: slice can therefore exceed the limit by at most 16 MiB before it is refused.
SLICE_BYTES = 512

MAX_JSON_DEPTH = 32
_BLOCK_BYTES = 1 << 20
#: Body that cannot exceed the limits if it has at most MAX_JSON_DEPTH brackets.
_FLAT_BYTES = 4 * 1024
_STEP_BY_SYMBOL = np.zeros(256, np.int8)
_STEP_BY_SYMBOL[[ord("["), ord("{")]] = 1
_STEP_BY_SYMBOL[[ord("]"), ord("}")]] = -1
_BEFORE_VALUE = np.zeros(256, np.bool_)
_BEFORE_VALUE[[ord("["), ord("{"), ord(","), ord(":")]] = True
_QUOTE = ord('"')


@dataclass(frozen=True)
class JsonLimits:
    """Limits on the content of a JSON body."""

    values: int  # numbers, texts, lists, objects, and names in objects
    containers: int
    """Lists and objects. Each costs several times as much as a number."""


#: Limits for bodies that the event loop itself parses: 20,000 values take a few milliseconds.
FEW = JsonLimits(values=20_000, containers=20_000)
#: SDKs send passes as protobuf. As JSON this is a million tokens with three inputs, or 10,000 datums.
MANY = JsonLimits(values=4 * 1024**2, containers=256 * 1024)
#: A chat of thousands of messages, or 256 prompts of tokens.
CHATS = JsonLimits(values=4 * 1024**2, containers=16 * 1024)


@dataclass(frozen=True)
class BodyReader:
    """Reader of request bodies of one tenant for one kind of endpoint."""

    parser: Parser
    tenant: TenantId
    limit_bytes: int
    json_limits: JsonLimits
    take: Callable[[int], None] = lambda _: None  # counts bytes as they arrive

    async def read(self, request: Request) -> bytes:
        """Read, decompress and measure the body of a request. Afterwards `body_weight` returns the weight of JSON.

        Raises:
            BodyTooLarge: it exceeds `limit_bytes` as sent or once decompressed, or `json_limits`.
            BODY_TOO_SLOW: it takes longer than RECEIVE_TIMEOUT_S to arrive.
            Unreadable: the compression is truncated or broken, or the JSON is nested too deep.
            UNSUPPORTED_MEDIA_TYPE: its content encoding is not zstd.
        """
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                body = await self._receive(request)
        except TimeoutError as late:
            raise Refused(Reason.BODY_TOO_SLOW) from late
        encoding = field_of(request, b"content-encoding", "identity").lower()
        if encoding == "zstd":
            body = decompress_small(body) or await self._decompress(body)
            self.take(len(body))
        elif encoding != "identity":
            raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding!r} is not supported; use zstd.")
        if not is_protobuf(request):  # FastAPI parses other content types, and none at all, as JSON, too
            values = await self.parser.run(self.tenant, len(body), count_json, body, self.json_limits)
            request.state.body_weight = max(len(body), JSON_VALUE_WEIGHT * values)
        return body

    async def _receive(self, request: Request) -> bytes:
        declared = field_of(request, b"content-length")
        if declared.isdecimal() and int(declared) > self.limit_bytes:
            raise BodyTooLarge(_too_large("Request body", self.limit_bytes))
        # One buffer for the whole body would be copied each time that it grows, and one object for each chunk costs
        # more than its bytes if the chunks are small.
        blocks, block, received = list[bytes | bytearray](), bytearray(), 0
        async for chunk in request.stream():
            self.take(len(chunk))
            received += len(chunk)
            if received > self.limit_bytes:
                raise BodyTooLarge(_too_large("Request body", self.limit_bytes))
            if len(chunk) >= _GATHERED_BYTES and not block:
                blocks.append(chunk)  # without a copy
            else:
                block += chunk
                if len(block) < _GATHERED_BYTES:
                    continue
                blocks.append(block)
                block = bytearray()
            await self.parser.loop_slots.take()
        return b"".join((*blocks, block))

    async def _decompress(self, body: bytes) -> bytes:
        # The decompressed size is still unknown, so even a small body counts as large.
        heavy = self.limit_bytes + THREAD_ABOVE
        return await self.parser.run(self.tenant, heavy, decompress, body, self.limit_bytes)


class CheckedRequest(Request):
    """A request whose body was read before its route runs."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._checked_body = body

    @override
    async def body(self) -> bytes:
        """Return the checked body."""
        return self._checked_body


def body_weight(request: Request) -> int:
    """Return the weight of a JSON body that was read, in the units of `Parser`."""
    weight: int = request.state.body_weight
    return weight


async def json_body(request: Request) -> bytes:
    """Return the checked body of a request with a JSON content type. Raises UNSUPPORTED_MEDIA_TYPE."""
    if not is_json(request):
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, "Send application/json.")
    return await request.body()


def is_json(request: Request) -> bool:
    """Return True if the content type of a request is JSON."""
    return _media_type(request) == "application/json"


def is_protobuf(request: Request) -> bool:
    """Return True if the content type of a request is protobuf."""
    return _media_type(request) == "application/x-protobuf"


def _media_type(request: Request) -> str:
    return field_of(request, b"content-type").partition(";")[0].strip().lower()


def field_of(request: Request, name: bytes, default: str = "") -> str:
    """Return the first field with this name in the head of a request.

    Starlette searches the whole head for each field. SDKs send twenty, and the frequent requests read seven of them.
    """
    state = request.scope.setdefault("state", {})
    if "fields" not in state:
        state["fields"] = dict(reversed(request.scope["headers"]))
    value: bytes | None = state["fields"].get(name)
    return default if value is None else value.decode("latin-1")


def decompress_small(body: bytes) -> bytes:
    """Decompress one zstd frame of at most SMALL_BYTES. Return b"" for any other input."""
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
    """Decompress one or more zstd frames, and stop as soon as the limit is exceeded.

    Raises:
        BodyTooLarge: the frames declare or contain more than `limit_bytes`.
        Unreadable: not zstd, truncated, more than MAX_FRAMES frames, or a frame that requests more
            memory than MAX_WINDOW_BYTES.
    """
    try:
        return b"".join(_frames(body, limit_bytes))
    except zstandard.ZstdError as error:
        raise Unreadable("The request body is not readable zstd.") from error


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


def count_json(body: bytes, limits: JsonLimits) -> int:
    """Return the number of values of a JSON body. The result is arbitrary if the body is not JSON.

    The body is not parsed yet: a list takes 2 bytes on the wire and 56 in memory. Counting takes time and memory proportional to the body size for any
    content. A regular expression does not, if a string is unterminated. A small flat body is counted 20 times faster,
    with the symbols in its texts.

    Raises:
        BodyTooLarge: the body exceeds the limits.
        Unreadable: brackets nest deeper than MAX_JSON_DEPTH.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= min(MAX_JSON_DEPTH, limits.containers) and len(body) <= _FLAT_BYTES <= limits.values:
        return opened + body.count(b",") + body.count(b":")
    depth = quotes = containers = values = 0
    for block in _blocks(body):
        # Remove escaped backslashes first. Then a quote after a backslash is escaped, and any other
        # quote ends a string.
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
            raise BodyTooLarge(f"The JSON body holds more than {limits.containers} lists and objects.")
        if values > limits.values:
            raise BodyTooLarge(f"The JSON body holds more than {limits.values} values.")
        depth, quotes = int(depths[-1]), int(quotes_before[-1])
    return values


def _blocks(body: bytes) -> Iterator[bytes]:
    """Yield the body in blocks that do not split an escape. The arrays of a count take several
    times the size of its block.
    """
    start = 0
    while start < len(body):
        end = start + _BLOCK_BYTES
        block = body[start:end]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            end += 1
            block = body[start:end]
        yield block
        start = end
