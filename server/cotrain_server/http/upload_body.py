"""Upload bodies, received into a file because they are too large for memory."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import structlog
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from cotrain_server.errors import BodyTooLarge, Unreadable
from cotrain_store.errors import Reason, Refused

log = structlog.get_logger()

#: A client that sends nothing for this long counts as disconnected.
SILENCE_S = 60.0
#: 512 MiB at 2.4 Mbit/s.
RECEIVE_S = 1800.0
_FLUSH_BYTES = 1024**2
#: Forms with an upload have only a few parts.
MAX_PARTS = 16
MAX_HEADER_BYTES = 16 * 1024
_READ_BYTES = 1024**2


@asynccontextmanager
async def received(
    request: Request, folder: Path, limit_bytes: int, reserve_bytes: int, name: str = "Upload"
) -> AsyncIterator[IO[bytes]]:
    """Receive a body into an unnamed file in `folder`, which is deleted when the context ends.

    Errors call the body `name`.

    Raises:
        BodyTooLarge: the body exceeds `limit_bytes`.
        BODY_TOO_SLOW: no byte for SILENCE_S, or incomplete after RECEIVE_S.
        DISK_RESERVE_REACHED: the disk would have less than `reserve_bytes` free.
        UNSUPPORTED_MEDIA_TYPE: it has a content encoding. The archive itself may be compressed.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, "Send the body without Content-Encoding.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(name, limit_bytes)
    with await asyncio.to_thread(_nameless_file, folder) as file:
        async for chunk in _chunks(request, limit_bytes, name):
            await asyncio.to_thread(_write, file, chunk, folder, reserve_bytes)
        file.seek(0)
        yield file


def _nameless_file(folder: Path) -> IO[bytes]:
    folder.mkdir(mode=0o700, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


async def _chunks(request: Request, limit_bytes: int, name: str) -> AsyncIterator[bytes]:
    """Yield the body in chunks of at least _FLUSH_BYTES, except the last."""
    total, waiting, end = 0, bytearray(), time.monotonic() + RECEIVE_S
    stream = aiter(request.stream())
    while chunk := await _next(stream, end):
        total += len(chunk)
        if total > limit_bytes:
            raise _too_large(name, limit_bytes)
        waiting += chunk
        if len(waiting) >= _FLUSH_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


async def _next(stream: AsyncIterator[bytes], end: float) -> bytes:
    left_s = end - time.monotonic()
    if left_s < 0:
        raise Refused(Reason.BODY_TOO_SLOW)
    try:
        async with asyncio.timeout(min(SILENCE_S, left_s)):
            return await anext(stream, b"")
    except TimeoutError as late:
        raise Refused(Reason.BODY_TOO_SLOW) from late


def _write(file: IO[bytes], chunk: bytes, folder: Path, reserve_bytes: int) -> None:
    if shutil.disk_usage(folder).free - len(chunk) < reserve_bytes:
        raise Refused(Reason.DISK_RESERVE_REACHED)
    try:
        file.write(chunk)
        file.flush()
    except OSError as full:
        log.error("upload_not_written", reason=full.strerror)
        raise Refused(Reason.DISK_RESERVE_REACHED) from full


def _too_large(name: str, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"{name} exceeds {limit_bytes / 1024**2:g} MiB.")


def file_in_form(body: IO[bytes], content_type: str, name: str) -> IO[bytes]:
    """Return `body`, reduced in place to the content of its first part with this name.

    Raises:
        UNSUPPORTED_MEDIA_TYPE: the content type is not a form.
        Unreadable: the form is incomplete, or has no such part.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, "Send multipart/form-data with a boundary.")
    part = _PartOfForm(body, name)
    try:
        parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": part.begin,
                "on_header_field": part.add_header,
                "on_header_value": part.add_value,
                "on_header_end": part.end_header,
                "on_part_data": part.add_content,
                "on_part_end": part.end,
            },
            max_header_size=MAX_HEADER_BYTES,
        )
        read = 0
        while not part.is_whole:
            body.seek(read)
            if not (chunk := body.read(_READ_BYTES)):
                raise Unreadable("The form is empty." if not read else part.missing())
            read += len(chunk)
            parser.write(chunk)
    except FormParserError as wrong:
        if not part.is_whole:
            raise Unreadable(part.missing()) from wrong
    body.truncate(part.size)
    body.seek(0)
    return body


class _PartOfForm:
    """Callbacks of a form parser that move the content of one part to the start of the form's file.

    The write position never passes the read position, since each chunk is read before it is parsed.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._parts, self._is_wanted = 0, False
        self._header, self._value = b"", b""
        self.size, self.is_whole = 0, False

    def missing(self) -> str:
        """Return the error message of a form without the part."""
        return f"The form has no whole part named {self._name!r} among its first {MAX_PARTS}."

    def begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS and not self.is_whole:
            raise Unreadable(self.missing())

    def add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._header.lower() == b"content-disposition" and not self.is_whole:
            _, options = parse_options_header(self._value)
            self._is_wanted = options.get(b"name") == self._name.encode()
        self._header = self._value = b""

    def add_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_wanted:
            self._file.seek(self.size)
            self.size += self._file.write(memoryview(data)[start:end])

    def end(self) -> None:
        self.is_whole |= self._is_wanted
        self._is_wanted = False
