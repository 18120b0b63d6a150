"""Removal of trailing zeros from Redis' append-only file after a power cut. No write of Redis ends in zeros.

A file system may write a file's new length before its new bytes. Such zeros were never synced, so no
acknowledged write is among them. Redis cuts an incomplete last command, but rejects a file that ends in zeros.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cotrain_store.blobs.folder import sync_folder
from cotrain_store.redis_client.embedded_server import LOG_FOLDER

#: Log file of Redis 6.2. Redis 7 moves it on its first start.
ONE_FILE = "appendonly.aof"
_RDB_MAGIC = b"REDIS"
_COMMAND_END = b"\r\n"
_CHUNK_BYTES = 1024**2
_LAST_INCREMENT = re.compile(r"^file (\S+\.incr\.aof) seq \d+ type i", re.MULTILINE)
_VALID_UP_TO = re.compile(r"ok_up_to=(\d+)")


@dataclass(frozen=True)
class Cut:
    """Result of a removal of zeros."""

    file: Path
    zero_bytes: int
    kept: Path  # copy of the original file


def cut_zeros(binary: Path, folder: Path) -> Cut | None:
    """Remove trailing zeros from the log that Redis wrote last in `folder`. Return None if there are none.

    Call it while no Redis runs. Raises OSError without a change.
    """
    file = last_file(folder)
    if file is None:
        return None
    size = file.stat().st_size
    end = _end_of_content(file, size)
    if end < size:
        end = max(end, _end_of_snapshot(binary, file, end))
    if end >= size:
        return None
    kept = file.with_name(f"{file.name}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.uncut")
    _copy(file, kept)
    with file.open("r+b") as log:
        log.truncate(end)
        os.fsync(log.fileno())
    return Cut(file, size - end, kept)


def last_file(folder: Path) -> Path | None:
    """Return the file that Redis appends to, or None if it does not exist yet."""
    file, manifest = folder / ONE_FILE, folder / LOG_FOLDER / f"{ONE_FILE}.manifest"
    if manifest.is_file():
        names = _LAST_INCREMENT.findall(manifest.read_text(errors="replace"))
        if not names:
            return None
        file = folder / LOG_FOLDER / names[-1]
    return file if file.is_file() else None


def _end_of_content(file: Path, size: int) -> int:
    """Return the number of bytes before the trailing zeros."""
    end = size
    with file.open("rb") as log:
        while end:
            start = max(0, end - _CHUNK_BYTES)
            log.seek(start)
            rest = log.read(end - start).rstrip(b"\0")
            if rest:
                return start + len(rest)
            end = start
    return 0


def _end_of_snapshot(binary: Path, file: Path, end: int) -> int:
    """Return the end of a snapshot without commands after it. Its checksum may itself end in zeros.

    Return 0 if commands follow it. Return the size of the file if the end cannot be determined, so that
    nothing is cut.
    """
    with file.open("rb") as log:
        is_snapshot = log.read(len(_RDB_MAGIC)) == _RDB_MAGIC
        log.seek(max(0, end - len(_COMMAND_END)))
        if not is_snapshot or log.read(len(_COMMAND_END)) == _COMMAND_END:
            return 0
    checked = subprocess.run(  # noqa: S603  # the server's own binary: this tool by its name
        ["redis-check-aof", file],  # noqa: S607  # its name alone
        executable=binary,
        capture_output=True,
        text=True,
        check=False,
    )
    found = _VALID_UP_TO.findall(checked.stdout)
    return int(found[-1]) if found else file.stat().st_size


def _copy(file: Path, kept: Path) -> None:
    try:
        shutil.copyfile(file, kept)
        kept.chmod(0o600)
        with kept.open("rb") as copy:
            os.fsync(copy.fileno())
        sync_folder(kept.parent)
    except OSError:
        kept.unlink(missing_ok=True)
        raise
