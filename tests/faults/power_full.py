"""A separate disk for one server, small enough to fill up."""

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
#: Free space below which a server here rejects new requests.
RESERVE_BYTES = 8 * 1024**2
LOOK_S = 0.05
_BALLAST = "ballast"


class CannotMount(Exception):
    """A small disk cannot be mounted: it needs root, and more privileges than a container usually
    has."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of DISK_BYTES at a folder, or raise CannotMount."""
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
    """Fill the disk except for `leave_bytes`."""
    with (folder / _BALLAST).open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while (room := shutil.disk_usage(folder).free - leave_bytes) > 0:
            if not ballast.write(bytes(min(room, 1 << 20))):
                raise OSError(errno.ENOSPC, "full")


def empty(folder: Path) -> None:
    """Free the space again."""
    (folder / _BALLAST).unlink()


def full_until_something_dies(host_deaths: int = 2) -> Disturb:
    """Fill the disk completely until `host_deaths` processes have crashed, then free the space."""

    async def disturb(host: Host) -> None:
        await until(lambda: host.count("worker.after_commit"), LOOK_S)
        fill(host.folder, 0)
        await until(lambda: len(host.deaths) >= host_deaths, LOOK_S)
        empty(host.folder)

    return disturb
