"""Upload bodies, received into a file because they are too large for memory.

`file_in_form` finds the file in a received form (`multipart/form-data`) without copying it.
"""

from __future__ import annotations

import asyncio
import io
import mmap
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import IO

import structlog
from starlette.requests import Request
from typing_extensions import Buffer, override

from cotrain_server.errors import BodyTooLarge, Unreadable
from cotrain_store.errors import Reason, Refused

log = structlog.get_logger()

#: A client that sends nothing for this long counts as disconnected.
SILENCE_S = 60.0
#: 512 MiB at 2.4 Mbit/s.
RECEIVE_S = 1800.0
_FLUSH_BYTES = 1024**2


@asynccontextmanager
async def received(
    request: Request, folder: Path, limit_bytes: int, reserve_bytes: int
) -> AsyncIterator[IO[bytes]]:
    """Receive a body into an unnamed file in `folder`, which is deleted when the context ends.

    Raises:
        BodyTooLarge: the body exceeds `limit_bytes`.
        BODY_TOO_SLOW: no byte for SILENCE_S, or incomplete after RECEIVE_S.
        DISK_RESERVE_REACHED: the disk would have less than `reserve_bytes` free.
        UNSUPPORTED_MEDIA_TYPE: it has a content encoding. The archive itself may be compressed.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, "Send the archive without Content-Encoding.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    with await asyncio.to_thread(_nameless_file, folder) as file:
        async for chunk in _chunks(request, limit_bytes):
            await asyncio.to_thread(_write, file, chunk, folder, reserve_bytes)
        file.seek(0)
        yield file


def _nameless_file(folder: Path) -> IO[bytes]:
    folder.mkdir(mode=0o700, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


async def _chunks(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body in chunks of at least _FLUSH_BYTES, except the last."""
    total, waiting, end = 0, bytearray(), time.monotonic() + RECEIVE_S
    stream = aiter(request.stream())
    while chunk := await _next(stream, end):
        total += len(chunk)
        if total > limit_bytes:
            raise _too_large(limit_bytes)
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


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"Upload exceeds {limit_bytes / 1024**2:g} MiB.")


#: Forms with an upload have only a few parts.
MAX_PARTS = 16
MAX_HEADER_BYTES = 16 * 1024
#: Size of one search. `mmap.find` holds the interpreter lock, so other threads wait for it.
_SEARCHED_BYTES = 1024**2


def file_in_form(body: IO[bytes], content_type: str, name: str) -> IO[bytes]:
    """Return the content of the part with this name, readable while `body` is open. Searches the
    whole body.

    Raises:
        UNSUPPORTED_MEDIA_TYPE: the content type is not a form.
        Unreadable: the form is incomplete, or has no such part.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, "Send multipart/form-data with a boundary.")
    try:
        with mmap.mmap(body.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin, end = _span_of(content, f"--{boundary}".encode("ascii", "replace"), name)
    except ValueError as empty:  # no file of no bytes can be mapped
        raise Unreadable("The form is empty.") from empty
    return io.BufferedReader(_Slice(body, begin, end))


def _span_of(content: mmap.mmap, delimiter: bytes, name: str) -> tuple[int, int]:
    """Return the start and end of a part's content."""
    at = _find(content, delimiter, 0)
    for _ in range(MAX_PARTS):
        begin = content.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES) + 4
        end = _find(content, b"\r\n" + delimiter, begin - 2)
        if at < 0 or begin < 4 or end < 0:
            break
        headers = BytesHeaderParser().parsebytes(content[at + len(delimiter) + 2 : begin])
        if headers.get_param("name", header="content-disposition") == name:
            return begin, max(begin, end)
        at = end + 2
    raise Unreadable(f"The form has no whole part named {name!r} among its first {MAX_PARTS}.")


def _find(content: mmap.mmap, wanted: bytes, start: int) -> int:
    """Return the position of `wanted`, or -1 if it does not occur."""
    for at in range(max(start, 0), len(content), _SEARCHED_BYTES):
        found = content.find(wanted, at, at + _SEARCHED_BYTES + len(wanted) - 1)
        if found >= 0:
            return found
    return -1


class _Slice(io.RawIOBase):
    """A slice of an open file, as a file."""

    def __init__(self, file: IO[bytes], begin: int, end: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, end - begin, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._at = start + offset
        return self._at

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        target = memoryview(buffer).cast("B")
        self._file.seek(self._begin + self._at)
        chunk = self._file.read(max(0, min(len(target), self._size - self._at)))
        target[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)
