"""Receive bodies that are too large for memory.

Find the file in a form (`multipart/form-data`) that was received into a file, without a copy of it.
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

from cotrain_server.errors import BodyTooLarge, BodyTooSlow, Unreadable, UnsupportedMediaType
from cotrain_store.errors import DiskReserveReached

log = structlog.get_logger()

#: Who sends nothing for this long has gone.
SILENCE_S = 60.0
#: 512 MiB at 2.4 Mbit/s.
RECEIVE_S = 1800.0
_FLUSH_BYTES = 1024**2


@asynccontextmanager
async def received(
    request: Request, folder: Path, limit_bytes: int, reserve_bytes: int
) -> AsyncIterator[IO[bytes]]:
    """Receive a body into a file without a name in `folder`; it is gone when the context ends.

    Raises:
        BodyTooLarge: more than `limit_bytes`.
        BodyTooSlow: nothing for SILENCE_S, or not all of it within RECEIVE_S.
        DiskReserveReached: the disk would have less than `reserve_bytes` left.
        UnsupportedMediaType: a content encoding; the archive itself may be compressed.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMediaType("Send the archive without Content-Encoding.")
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
    """Give the body in chunks that are worth a write."""
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
        raise BodyTooSlow
    try:
        async with asyncio.timeout(min(SILENCE_S, left_s)):
            return await anext(stream, b"")
    except TimeoutError as late:
        raise BodyTooSlow from late


def _write(file: IO[bytes], chunk: bytes, folder: Path, reserve_bytes: int) -> None:
    if shutil.disk_usage(folder).free - len(chunk) < reserve_bytes:
        raise DiskReserveReached
    try:
        file.write(chunk)
        file.flush()
    except OSError as full:
        log.error("upload_not_written", reason=full.strerror)
        raise DiskReserveReached from full


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"Upload exceeds {limit_bytes / 1024**2:g} MiB.")


#: Forms that hold an upload have one part, or a few.
MAX_PARTS = 16
MAX_HEADER_BYTES = 16 * 1024
#: `mmap.find` holds the interpreter's lock. Other threads wait for a stretch of this length.
_SEARCHED_BYTES = 1024**2


def file_in_form(body: IO[bytes], content_type: str, name: str) -> IO[bytes]:
    """Give the content of the part of this name, to be read while `body` is open. Searches all of it.

    Raises:
        UnsupportedMediaType: it is no form.
        Unreadable: it is not whole, or has no such part.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise UnsupportedMediaType("Send multipart/form-data with a boundary.")
    try:
        with mmap.mmap(body.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin, end = _span_of(content, f"--{boundary}".encode("ascii", "replace"), name)
    except ValueError as empty:  # no file of no bytes can be mapped
        raise Unreadable("The form is empty.") from empty
    return io.BufferedReader(_Slice(body, begin, end))


def _span_of(content: mmap.mmap, delimiter: bytes, name: str) -> tuple[int, int]:
    """Find where a part's content begins and ends."""
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
    """Return where something begins; -1 where it is nowhere."""
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
