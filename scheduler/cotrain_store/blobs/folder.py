"""Blobs as files below one folder, which processes of several hosts may share.

The module also has the rules for all files: names durable after a power cut, and transient read errors.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self
from uuid import uuid4

from cotrain_store.blobs.protocol import Blob, Moments
from cotrain_store.failpoints import failpoint, write_past

#: Errors of a lost file: no such name, a bad sector, a damaged file system.
_LOST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN})


def passes(error: Exception) -> bool:
    """Return True if an unreadable file may be intact and readable later.

    Examples: no free descriptor, no memory, an unavailable file server.
    """
    return isinstance(error, OSError) and error.errno not in _LOST


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, durable by name when this returns. Idempotent.

    An existing folder is synced, too: the process that made it may have crashed before its own sync.
    """
    if not folder.parent.exists():
        make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # usually a folder, which another process may have removed since
        # One `stat` only: the folder may disappear between two.
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only the content of its files."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: Open to read, but not through a link, and without waiting for the other end of a pipe.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Folder:
    """Files `<folder>/<key>`, readable by their owner only; written under a name that begins with a dot, then renamed."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        """Open a folder. `root` is `folder` or a folder above it; names created below it are durable."""
        self.folder = folder
        self._root = root or folder

    def below(self, prefix: str) -> Self:
        """Return the blobs of a subfolder."""
        return type(self)(self.folder / prefix, self._root)

    def put(self, key: str, content: bytes, *, new: bool = False, moments: Moments | None = None) -> None:
        """Write a file, fsync it, and rename it. Raises OSError, FileExistsError."""
        path = self.folder / key
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
        with _made(unfinished) as file:
            if moments:
                write_past(moments.half_written, file, content)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if moments:
            failpoint(moments.before_rename)
        if new:
            try:
                os.link(unfinished, path)
            finally:
                unfinished.unlink()
        else:
            unfinished.rename(path)
        if moments:
            failpoint(moments.renamed)
        self._settle(key)

    def _settle(self, key: str) -> None:
        """Make the name of a file durable; the process that created it may have crashed before its sync."""
        folder = (self.folder / key).parent
        while folder.is_relative_to(self._root):
            sync_folder(folder)
            folder = folder.parent

    def get(self, key: str, span: tuple[int, int] | None = None) -> bytes:
        """Return the content of a file, or a part of it; raises OSError."""
        with (self.folder / key).open("rb") as file:
            if span is None:
                return file.read()
            file.seek(span[0])
            return file.read(span[1] - span[0])

    def touch(self, key: str) -> bool:
        """Set the date of an existing file, and make its name durable."""
        try:
            os.utime(self.folder / key)
        except FileNotFoundError:
            return False
        self._settle(key)
        return True

    def open(self, key: str) -> tuple[BinaryIO, Blob]:
        """Open a regular file, never through a link; raises OSError."""
        descriptor = os.open(self.folder / key, _FLAGS)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "No regular file", key)
        return os.fdopen(descriptor, "rb", buffering=0), _blob(key, found)

    def exists(self, key: str) -> bool:
        """Return True if the file exists."""
        return (self.folder / key).is_file()

    def delete(self, key: str) -> None:
        """Delete a file, and its folder with the last file. Idempotent."""
        path = self.folder / key
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has others, or another process has just removed it
            if path.parent != self.folder:
                path.parent.rmdir()

    def list(self, prefix: str = "") -> Iterator[Blob]:
        """List files in the order of their keys."""
        for folder, folders, names in os.walk(self.folder / prefix):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)  # noqa: PTH118 - of 40,000 files, three times as fast
                with contextlib.suppress(FileNotFoundError):
                    yield _blob(os.path.relpath(path, self.folder), os.lstat(path))


def _made(path: Path) -> BinaryIO:
    """Open a new file that only its owner can read, creating its folder; raises OSError."""
    while True:
        make_folder(path.parent)
        # `delete` may just have removed the folder with its last file.
        with contextlib.suppress(FileNotFoundError):
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _blob(key: str, found: os.stat_result) -> Blob:
    mark = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return Blob(key, found.st_size, mark)
