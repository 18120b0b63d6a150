"""Receive bodies that are too large for memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING

import structlog

from cotrain_server.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType
from cotrain_store.errors import DiskReserveReached

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.requests import Request

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
