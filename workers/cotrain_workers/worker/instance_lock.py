"""A worker id belongs to one process: by a lock on this host, by the heartbeat on any other.

Epochs keep two processes with one worker id from harming each other, but the older one would be fenced
off. That a second one was started is an operator's mistake, and is reported as one; where none is given, each takes one that is free.
"""

from __future__ import annotations

import fcntl
import os
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from cotrain_store.messages.ids import WorkerId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cotrain_store.messages.fleet import WorkerHeartbeat

#: A process that was just killed needs a moment to end, and its last heartbeat is seen for a while.
PATIENCE_S = 15.0
POLL_S = 0.1
#: A heartbeat from another host is watched for this long: a living process sends five of them, and that of
#: a dead one has run out.
WATCHED_S = 12.0


class WorkerIdInUse(Exception):
    """Another living process has this worker id."""


def lock_worker_id(folder: Path, pool: str, worker: str, patience_s: float = PATIENCE_S) -> int:
    """Lock a worker id on this host; the file descriptor holds it, until the process ends.

    Raises:
        WorkerIdInUse: another process holds it, and did for `patience_s`.
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
            raise WorkerIdInUse(
                f"Another process is worker {worker}; it holds {path}. Give each worker an id of its "
                "own (COTRAIN_WORKER_ID)."
            ) from None
        return file


def await_absence(
    holder: Callable[[], WorkerHeartbeat | None], host: str, patience_s: float = PATIENCE_S
) -> None:
    """Wait until no process on another host sends heartbeats under this worker id.

    Raises:
        WorkerIdInUse: one did for `patience_s`, which is longer than a last heartbeat is seen.
    """
    until = time.monotonic() + patience_s
    while True:
        heartbeat = holder()
        if heartbeat is None or heartbeat.host in ("", host):
            return
        if time.monotonic() >= until:
            raise WorkerIdInUse(
                f"Another process, on host {heartbeat.host}, is worker {heartbeat.id}. Give each worker an id of "
                "its own (COTRAIN_WORKER_ID)."
            )
        time.sleep(POLL_S)


def claim_free_worker_id(
    folder: Path, pool: str, heartbeat_of: Callable[[WorkerId], WorkerHeartbeat | None], host: str
) -> WorkerId:
    """Lock the first id of w0, w1, … that no process has, on this host or another; until the process ends.

    The successor of a process that ended gets its id, and with it the runs that it had.
    """
    for number in count():
        worker = WorkerId(f"w{number}")
        try:
            lock = lock_worker_id(folder, pool, worker, patience_s=0)
        except WorkerIdInUse:
            continue
        if not _lives_elsewhere(partial(heartbeat_of, worker), host):
            return worker
        os.close(lock)
    raise AssertionError("There is no last number.")


def _lives_elsewhere(holder: Callable[[], WorkerHeartbeat | None], host: str) -> bool:
    """Watch whether the heartbeats of another host go on; False once the last one has run out."""
    first, until = holder(), time.monotonic() + WATCHED_S
    heartbeat = first
    while heartbeat is not None and heartbeat.host not in ("", host):
        if heartbeat != first or time.monotonic() >= until:
            return True
        time.sleep(POLL_S)
        heartbeat = holder()
    return False
