"""What holds for all our files: names that a power cut does not take, errors that say nothing of them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: What says of a file that it is lost: no such name, a bad sector, a damaged file system.
_LOST = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
)


def passes(error: Exception) -> bool:
    """Tell whether a file that could not be read may well be there, whole, when it is read again.

    So it is without a free descriptor, or memory, or while a file server is away.
    """
    return isinstance(error, OSError) and error.errno not in _LOST


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can read, durable by name when this returns; twice is harmless.

    One that is there may have been made by a process that died before it could make that durable.
    """
    if not folder.parent.exists():
        make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # as a rule a folder, which another process may have removed since
        # Looked at once: it may go between two looks.
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only what the files hold."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
