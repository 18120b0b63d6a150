"""A worker's place belongs to one process: a lock on this host, a sign of life on any other.

Epochs keep two processes with one worker id from harming each other, but the older one would be thrown
out. That a second one was started is an operator's mistake, which is told.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cotrain_store.messages.fleet import WorkerHeartbeat

#: A process that was just killed needs a moment to be gone, and its last beat is seen for a while.
PATIENCE_S = 15.0
POLL_S = 0.1


class PlaceTaken(Exception):
    """Another living process has this worker id."""


def take_place(folder: Path, pool: str, worker: str, patience_s: float = PATIENCE_S) -> int:
    """Lock a worker's place on this host; the file descriptor holds it, until the process ends.

    Raises:
        PlaceTaken: another process holds it, and did for `patience_s`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"worker-{pool}-{worker}.lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(POLL_S)
                continue
            os.close(file)
            raise PlaceTaken(
                f"Another process is worker {worker}; it holds {path}. Give each worker an id of its "
                "own (COTRAIN_WORKER_ID)."
            ) from None
        return file


def await_absence(
    holder: Callable[[], WorkerHeartbeat | None], host: str, patience_s: float = PATIENCE_S
) -> None:
    """Wait until nobody on another host beats at this worker's place.

    Raises:
        PlaceTaken: somebody did for `patience_s`, which is longer than a last beat is seen.
    """
    until = time.monotonic() + patience_s
    while True:
        beat = holder()
        if beat is None or beat.host in ("", host):
            return
        if time.monotonic() >= until:
            raise PlaceTaken(
                f"Another process, on host {beat.host}, is worker {beat.id}. Give each worker an id of "
                "its own (COTRAIN_WORKER_ID)."
            )
        time.sleep(POLL_S)
