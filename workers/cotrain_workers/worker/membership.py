"""Membership of a worker in its pool: its exclusive id, its heartbeat, and the handover of its runs."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from cotrain_store.errors import Fenced
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import WorkerId
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.moves import OwnDrain
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.recovery.run_lifecycle import RunLifecycle
from cotrain_workers.sampling.service import SamplingService

log = structlog.get_logger()

HEARTBEAT_S = 2.0
#: Wait in s for a killed process to end and for its last heartbeat to expire.
PATIENCE_S = 15.0
POLL_S = 0.1
#: Observation time in s of a heartbeat from another host. A running process sends five in this
#: time, and the heartbeat of a crashed one expires.
WATCHED_S = 12.0


class WorkerIdInUse(Exception):
    """Error: another running process has this worker id."""


def lock_worker_id(folder: Path, pool: str, worker: str, patience_s: float = PATIENCE_S) -> int:
    """Lock a worker id on this host. The returned file descriptor holds the lock until the process ends.

    Epochs keep two processes with one id from harming each other, but the older one would be fenced. A second process
    is an operator's mistake and is reported as one.

    Raises:
        WorkerIdInUse: another process has held it for `patience_s`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"worker-{pool}-{worker}.lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(file)
                raise WorkerIdInUse(
                    f"Another process is worker {worker}; it holds {path}. Give each worker an id of its "
                    "own (COTRAIN_WORKER_ID)."
                ) from None
            time.sleep(POLL_S)
        else:
            return file


def await_absence(
    holder: Callable[[], WorkerHeartbeat | None],
    host: str,
    patience_s: float = PATIENCE_S,
    *,
    awaits_its_end: bool = True,
) -> None:
    """Wait until no process on another host sends heartbeats under this worker id.

    Raises:
        WorkerIdInUse: one did for `patience_s`, which is longer than the expiry of a heartbeat. Unless it
            `awaits_its_end`, a renewed heartbeat is enough.
    """
    first, until = holder(), time.monotonic() + patience_s
    heartbeat = first
    while heartbeat is not None and heartbeat.host not in ("", host):
        if time.monotonic() >= until or (heartbeat != first and not awaits_its_end):
            raise WorkerIdInUse(
                f"Another process, on host {heartbeat.host}, is worker {heartbeat.id}. Give each worker an id of "
                "its own (COTRAIN_WORKER_ID)."
            )
        time.sleep(POLL_S)
        heartbeat = holder()


def claim_free_worker_id(
    folder: Path, pool: str, heartbeat_of: Callable[[WorkerId], WorkerHeartbeat | None], host: str
) -> WorkerId:
    """Lock the first of the ids w0, w1, … that no process uses on any host, until this process ends.

    The successor of a process that ended gets its id, and with it its runs.
    """
    for number in count():
        worker = WorkerId(f"w{number}")
        try:
            lock = lock_worker_id(folder, pool, worker, patience_s=0)
        except WorkerIdInUse:
            continue
        try:
            await_absence(partial(heartbeat_of, worker), host, WATCHED_S, awaits_its_end=False)
        except WorkerIdInUse:
            os.close(lock)
        else:
            return worker
    raise AssertionError("There is no last number.")


class Heartbeat:
    """Thread that sends heartbeats until `end`, also during a drain. It sets `stopping` once this
    worker was replaced.
    """

    def __init__(
        self, execution: Execution, describe: Callable[[], WorkerHeartbeat], stopping: threading.Event
    ) -> None:
        self._execution = execution
        self._describe = describe
        self._stopping = stopping
        self._ended = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._send_until_stopped, name="heartbeat", daemon=True)
        self.was_replaced = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop sending, and wait for the last heartbeat."""
        self._ended.set()
        self._thread.join()

    def send(self) -> None:
        """Send a heartbeat now. A later one never contains older facts.

        Raises:
            Fenced: this worker was replaced.
        """
        with self._one_at_a_time:
            self._execution.heartbeat(self._describe())

    def _send_until_stopped(self) -> None:
        try:
            while True:
                try:
                    self.send()
                except Fenced:
                    self.was_replaced = True
                    return
                except (OSError, *CONNECTION_LOST):  # OSError if no file descriptor is free
                    log.warning("heartbeat_failed")
                if self._ended.wait(HEARTBEAT_S):
                    return
        # no step is planned for a worker without a heartbeat, so it ends, whatever the reason
        finally:
            self._stopping.set()


@dataclass
class Drain:
    """Drain of one worker, from the operator's request until its withdrawal or the end of the process.

    The heartbeat's thread updates it, and the worker loop reads it. The worker hands over one run at a time while it
    continues, after the run's last op is in a snapshot.
    """

    own: OwnDrain
    runs: RunLifecycle
    weights: WeightsStore
    sampler: SamplingService
    is_asked: bool = False
    leaves: bool = False
    """True if this process is shutting down. Nothing is planned for it, with or without another worker."""
    is_handing_over: bool = False
    """True if another worker exists to take over the runs. Any thread may read it."""

    @property
    def state(self) -> str:
        """State as the heartbeat reports it."""
        if self.leaves:
            return "draining"
        if not self.is_asked:
            return "serving"
        has_work = self.runs.resident or self.weights.unstored or self.sampler.running
        return "drained" if self.is_handing_over and not has_work else "draining"

    def look(self) -> None:
        """Read the operator's request, and check for another worker."""
        if self.leaves:
            return
        is_asked = self.own.is_requested()
        is_handing_over = is_asked and self.own.has_successor()
        if self.is_handing_over and not is_handing_over and not self.own.is_listed():
            self.own.rejoin()
        if (is_asked, is_handing_over) != (self.is_asked, self.is_handing_over):
            log.info("drain_changed", asked=is_asked, is_handing_over=is_handing_over)
        self.is_asked, self.is_handing_over = is_asked, is_handing_over

    def hand_over_runs(self) -> None:
        """Hand over runs between steps during a handover, and claim no samples then."""
        self.sampler.accepts_requests = not self.is_handing_over
        if self.is_handing_over:
            self.runs.hand_over()

    def end(self, epoch: int) -> None:
        """Deregister the worker if another worker can take its runs, so that they can move anywhere at once.

        If none can, or if work is left here, the next process with this worker id continues it.
        """
        log.info("worker_left", runs_go_elsewhere=self.own.deregister(epoch))


def move_runs(execution: Execution, runs: RunLifecycle) -> None:
    """Copy out the runs that must move to another worker, and hand over those with a complete copy.

    Raises:
        Fenced: another process took over this worker id.
    """
    for move in execution.moves.wanted():
        in_memory = runs.in_memory(move.run)
        if in_memory and not runs.copies.is_copied(move.run):
            continue
        failpoint("move.before", move.run)
        if execution.moves.hand_over(move, execution.epoch, in_memory=in_memory):
            failpoint("move.after", move.run)
            runs.forget_state(move.run)
            log.info("run_moved", run=move.run, to=move.to)
