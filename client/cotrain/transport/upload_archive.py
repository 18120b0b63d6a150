"""An adapter as the bytes of one archive, read from disk while they are sent."""

from __future__ import annotations

import asyncio
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK_BYTES = 1024**2


@dataclass(frozen=True)
class UploadArchive:
    """What is sent, in order: bytes, and the content of files."""

    parts: tuple[bytes | Path, ...]
    size: int

    async def chunks(
        self, progress: Callable[[int, int], None] | None = None
    ) -> AsyncIterator[bytes]:
        """Give the bytes, from the first one on each time; `progress` is called with what has been sent."""
        sent = 0
        for part in self.parts:
            async for chunk in _content(part):
                yield chunk
                sent += len(chunk)
                if progress:
                    progress(sent, self.size)


def archive_of(source: Path) -> UploadArchive:
    """Take an archive as it is, and of a folder the two files that make a PEFT adapter, as a tar.

    Raises OSError.
    """
    if not source.is_dir():
        return UploadArchive((source,), source.stat().st_size)
    parts: list[bytes | Path] = []
    for name in ADAPTER_FILES:
        info = tarfile.TarInfo(name)
        info.size = (source / name).stat().st_size
        parts += [
            info.tobuf(tarfile.GNU_FORMAT),
            source / name,
            bytes(-info.size % tarfile.BLOCKSIZE),
        ]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    return UploadArchive(tuple(parts), sum(map(_size, parts)))


def _size(part: bytes | Path) -> int:
    return part.stat().st_size if isinstance(part, Path) else len(part)


async def _content(part: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(part, bytes):
        yield part
        return
    with await asyncio.to_thread(part.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
