"""A disk of its own for one server, small enough to be filled up."""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.faults.host import Host
from tests.faults.trial import Disturb
from tests.support.waiting import until

DISK_BYTES = 64 * 1024**2
#: Free space below which a server here takes nothing new.
RESERVE_BYTES = 8 * 1024**2
LOOK_S = 0.05
_BALLAST = "ballast"


class CannotMount(Exception):
    """Mounting a small disk needs root, and more than a container usually gives it."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of DISK_BYTES at a folder; raises CannotMount."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as failed:
        raise CannotMount from failed
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int) -> None:
    """Take all room but so much."""
    with (folder / _BALLAST).open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while (room := shutil.disk_usage(folder).free - leave_bytes) > 0:
            if not ballast.write(bytes(min(room, 1 << 20))):
                raise OSError(errno.ENOSPC, "full")


def empty(folder: Path) -> None:
    """Give the room back."""
    (folder / _BALLAST).unlink()


def full_until_something_dies(host_deaths: int = 2) -> Disturb:
    """Fill the disk to the last byte until processes have died of it, then give the room back."""

    async def disturb(host: Host) -> None:
        await until(lambda: host.count("worker.after_commit"), LOOK_S)
        fill(host.folder, 0)
        await until(lambda: len(host.deaths) >= host_deaths, LOOK_S)
        empty(host.folder)

    return disturb
