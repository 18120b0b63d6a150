"""Data folder of a server: its lock and its files."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from cotrain_store.blobs.folder import make_folder
from cotrain_store.disk.embedded_redis import LOG_FOLDER, MAX_SOCKET_PATH

SOCKET_NAME = "redis.sock"
METRICS_TARGETS = "prometheus-targets.json"
#: Size above which a log is moved to `.1`, replacing the previous one.
LOG_BYTES = 64 * 1024**2

LOG_END_BYTES = 64 * 1024
#: Minimum number of bytes that a start writes. Less free space counts as a full disk.
PROBE_BYTES = 64 * 1024


class FolderInUse(Exception):
    """Another server uses this data folder, or a process of one is still ending."""


class UnsafeFolder(Exception):
    """This folder belongs to another user."""


class UnusableFolder(Exception):
    """Nothing can be kept in this folder."""


@contextmanager
def _used(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        at = Path(error.filename) if isinstance(error.filename, str) else folder
        where = "" if at == folder else f" ({at})"
        raise UnusableFolder(
            f"The data folder {folder} cannot be used: {error.strerror}{where}. Give a folder that this user can "
            "write to, on a disk with free space, by --data-dir or COTRAIN_DATA_DIR."
        ) from error


class DataFolder:
    """Data folder of one server. All content is readable only by its owner."""

    def __init__(self, path: Path) -> None:
        """Create missing folders. Raises UnusableFolder."""
        self.path = path
        with _used(path):
            if not path.exists():  # a parent of an existing folder may be unreadable
                make_folder(path)
            for folder in (self.logs, self.redis, self.redis / LOG_FOLDER):
                make_folder(folder)

    @property
    def logs(self) -> Path:
        """Folder of the logs, one file per process."""
        return self.path / "logs"

    @property
    def redis(self) -> Path:
        """Folder of the append-only file."""
        return self.path / "redis"

    def write_metrics_targets(self, targets: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics targets for Prometheus atomically, because it may read at any time."""
        path = self.path / METRICS_TARGETS
        temporary = path.with_suffix(".new")
        with _used(self.path):
            temporary.write_text(json.dumps(list(targets), indent=1) + "\n")
            temporary.replace(path)

    def lock(self) -> int:
        """Lock the folder, held by the returned file descriptor. Raises FolderInUse, UnusableFolder.

        Every child process inherits the descriptor, so the folder is free only after the last of them has exited. A new
        server therefore never runs next to a Redis or worker of the previous one.
        """
        with _used(self.path):
            file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as locked:
                os.close(file)
                raise FolderInUse(f"Another server uses {self.path}, or is still ending.") from locked
            except OSError:  # a file system without locks
                os.close(file)
                raise
        return file

    def check_writable(self) -> None:
        """Raise UnusableFolder if nothing can be written. The processes' own errors would be less clear."""
        with _used(self.path), tempfile.TemporaryFile(dir=self.path) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())

    def socket(self) -> Path:
        """Return the socket path of the embedded Redis in a private folder. Raises UnsafeFolder, UnusableFolder."""
        with _used(self.path):
            _socket_name(self.path).parent.mkdir(mode=0o700, exist_ok=True)
        return found_socket(self.path)

    def log_of(self, process: str) -> Path:
        """Return the path of a process's log."""
        return self.logs / f"{process}.log"

    def open_log(self, process: str) -> int:
        """Open a process's log for appending. The caller closes the descriptor."""
        path = self.log_of(process)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def new_lines(self, process: str) -> TextIO:
        """Open a process's log to read the lines that it writes from now on."""
        path = self.log_of(process)
        log = os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), errors="replace")
        log.seek(0, os.SEEK_END)
        return log

    def log_end(self, process: str) -> list[str]:
        """Return the last lines of a process's log. The first may be incomplete."""
        with self.log_of(process).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def put_logs_aside(self) -> None:
        """Copy large logs and empty them in place, because their writers keep them open.

        Every refused request is logged, even from clients without a key, and must not fill the disk.
        """
        for path in self.logs.glob("*.log"):
            if path.stat().st_size > LOG_BYTES:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                path.with_suffix(".log.1").chmod(0o600)
                os.truncate(path, 0)


def found_socket(path: Path) -> Path:
    """Return the socket path of the server that uses this data folder, without creating anything. Raises UnsafeFolder."""
    socket = _socket_name(path)
    if socket.parent.exists():
        found = socket.parent.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UnsafeFolder(f"{socket.parent} is not a folder that only this user can read.")
    return socket


def _socket_name(path: Path) -> Path:
    if len(str(path / "run" / SOCKET_NAME)) <= MAX_SOCKET_PATH:
        return path / "run" / SOCKET_NAME
    name = f"cotrain-{sha256(str(path).encode()).hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / name / SOCKET_NAME
