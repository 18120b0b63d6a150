"""Failpoints: named points of the code at which a test can kill, stop, fail or delay this process. Off by default.

The variable `COTRAIN_FAILPOINTS=name[~about]=action[@nth],…` sets faults. The action happens the `nth` time
that the point is reached (default 1; `*`: every time). Actions are `kill` (SIGKILL to itself), `stop`
(SIGSTOP), `error` (OSError of a full disk) and `sleep:<s>`. With `~about`, only requests or runs of this name
count. A point may have several faults.

The variable `COTRAIN_FAILPOINTS_LOG=<file>` logs every reached point as a line `<name> <pid> <about>`. With it,
`nth` counts over all processes that share the file. A restarted process therefore passes the point at which its
predecessor crashed. Without it, each process counts separately.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

FAILPOINTS: Mapping[str, str] = MappingProxyType(
    {
        "api.before_submit": "A request is checked and its body stored, but not in the log.",
        "api.after_submit": "A request is in the log, and its client has no response yet.",
        "api.before_answer": "A result was read, and its client has not received it.",
        "spool.before_write": "Bodies wait to be written to a segment.",
        "spool.half_written": "Half a record is in a segment.",
        "spool.before_sync": "Records are written and not durable.",
        "spool.after_sync": "Records are durable, and no request refers to them.",
        "scheduler.before_plan": "A cycle is chosen and not written.",
        "scheduler.after_plan": "A cycle is written, and the scheduler has not read the reply of the script.",
        "reassign.before": "A worker has long had no heartbeat, and its work is not reassigned.",
        "reassign.after": "The work of a lost worker is reassigned, and the scheduler has not read the reply.",
        "move.before": "A run that moves to another worker is copied out, and still belongs to its owner.",
        "move.after": "A run belongs to another worker, and its old owner has not read the reply.",
        "worker.entered": "A worker took its slot: its predecessor is fenced off.",
        "worker.replayed": "A run was restored from its log.",
        "worker.rewound": "A run in memory is back at an earlier step, and its log is not.",
        "worker.before_rollback": "A run's checkpoint is copied as its state, and its log still has later ops.",
        "worker.after_rollback": "A run is rolled back to a checkpoint, and its worker has not read the reply.",
        "worker.before_run": "A step was read and not begun.",
        "worker.after_run": "A step was computed; memory is ahead of the log.",
        "worker.before_commit": "A step is computed, and its commit is not sent.",
        "worker.after_commit": "A step was committed, and its worker has not read the reply.",
        "worker.before_risk": "A request that may have crashed a worker is counted as a crash, and runs alone next.",
        "worker.after_risk": "A request that ran alone did not crash its worker, and its crash count is not removed.",
        "worker.before_large_pass": "A micro-batch larger than any before is recorded, and runs next.",
        "group.before_pass": "A member of a group runs the base model next, in step with the others.",
        "snapshot.before_write": "A run was copied to the host for its recovery copy.",
        "snapshot.half_written": "Half a recovery copy is in its temporary file.",
        "snapshot.before_rename": "A recovery copy is whole under its temporary name.",
        "snapshot.renamed": "A recovery copy has its name, which is not durable.",
        "snapshot.before_register": "A recovery copy is durable, and the log is not cut.",
        "snapshot.registered": "The log was cut; obsolete recovery copies are not deleted.",
        "weights.half_written": "Half a save's adapter is in its temporary folder.",
        "weights.before_rename": "A save's adapter is whole under its temporary name.",
        "weights.renamed": "A save's adapter has its name, and is not recorded in the store.",
        "weights.before_stored": "A save's files are durable, and not recorded in the store.",
        "weights.stored": "A save's files are recorded in the store, and its worker has not read the reply.",
        "optimizer.half_written": "Half a save's optimizer state is in its temporary file.",
        "optimizer.before_rename": "A save's optimizer state is whole under its temporary name.",
        "optimizer.renamed": "A save's optimizer state has its name, and is not recorded in the store.",
        "external.half_written": "Some files of an export are encrypted.",
        "external.before_rename": "An export is whole under its temporary name.",
        "external.renamed": "An export has its name, and is not recorded in the store.",
        "sample.claimed": "Sample requests were claimed, and their worker has not read the reply.",
        "sample.before_resolve": "Samples are drawn and not stored.",
        "sample.after_resolve": "Samples are stored, and their worker has not read the reply.",
    }
)

_FAULT = re.compile(
    r"(?P<name>[a-z_.]+)(?:~(?P<about>[^=,]+))?"
    r"=(?P<action>kill|stop|error|sleep:(?P<sleep_s>\d+(?:\.\d+)?))(?:@(?P<nth>[1-9]\d*|\*))?"
)


@dataclass(frozen=True)
class Fault:
    """Action at the `nth` time (None: each time) that a failpoint is reached for a matching `about`."""

    name: str
    about: str
    action: str
    nth: int | None
    sleep_s: float = 0.0

    def counts(self, line: str) -> bool:
        """Return True if the fault applies to the failpoint of this log line."""
        name, _, about = line.split(" ", 2)
        return name == self.name and self.about in about

    def trigger(self) -> None:
        """Execute the action. Raises OSError for `error`."""
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "error":
            raise OSError(errno.ENOSPC, f"Failpoint {self.name}")
        time.sleep(self.sleep_s)


def parse_faults(text: str) -> list[Fault]:
    """Parse `COTRAIN_FAILPOINTS`. Raises ValueError for a malformed fault or an unknown failpoint."""
    faults = []
    for one in text.split(","):
        found = _FAULT.fullmatch(one.strip())
        if not found or found["name"] not in FAILPOINTS:
            raise ValueError(f"COTRAIN_FAILPOINTS: {one!r} is no fault at a known moment.")
        nth = None if found["nth"] == "*" else int(found["nth"] or 1)
        action, sleep_s = found["action"].partition(":")[0], float(found["sleep_s"] or 0)
        faults.append(Fault(found["name"], found["about"] or "", action, nth, sleep_s))
    return faults


class Faults:
    """Configured faults, and the failpoints reached so far."""

    def __init__(self, faults: Sequence[Fault], log: str | None) -> None:
        self._reached = dict.fromkeys(faults, 0)
        """Number of times each fault's failpoint was reached in the part of the log that was read."""
        self._watched = {fault.name for fault in faults}
        self._log = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600) if log else None
        self._read_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> Faults | None:
        """Return the faults of the environment, or None if failpoints are off."""
        text, log = environ.get("COTRAIN_FAILPOINTS"), environ.get("COTRAIN_FAILPOINTS_LOG")
        return cls(parse_faults(text) if text else [], log) if text or log else None

    def reach(self, name: str, about: str) -> None:
        """Record a failpoint and execute due faults. Raises ValueError for an unregistered name."""
        if name not in FAILPOINTS:
            raise ValueError(f"{name!r} is no failpoint.")
        with self._lock:
            due = self._due_faults(f"{name} {os.getpid()} {about}")
        for fault in due:
            fault.trigger()

    def _due_faults(self, line: str) -> list[Fault]:
        """Record a failpoint and return the faults that are due."""
        if self._log is not None:
            os.write(self._log, f"{line}\n".encode())
        if line.partition(" ")[0] not in self._watched:
            return []
        for reached in self._unread(line):
            for fault in self._reached:
                self._reached[fault] += fault.counts(reached)
        return [fault for fault, times in self._reached.items() if fault.counts(line) and fault.nth in (None, times)]

    def _unread(self, line: str) -> list[str]:
        """Return the uncounted failpoints of all processes, up to this one."""
        if self._log is None:
            return [line]
        unread = os.pread(self._log, os.fstat(self._log).st_size, self._read_bytes)
        # Other processes may have written after it, forked ones at the same offset.
        own = f"\n{line}\n".encode()
        end = (b"\n" + unread).rindex(own) + len(own) - 1
        self._read_bytes += end
        return unread[:end].decode().splitlines()


_FAULTS = Faults.configured(os.environ)


def failpoint(name: str, about: str | Iterable[str] = "") -> None:
    """Mark a point of FAILPOINTS. `about` names a run, requests, or a location."""
    if _FAULTS is not None:
        _FAULTS.reach(name, about if isinstance(about, str) else " ".join(about))


def write_past(name: str, file: BinaryIO, content: bytes) -> None:
    """Write `content`. If failpoints are on, reach the failpoint `name` between its halves."""
    half = len(content) // 2 if _FAULTS is not None else 0
    file.write(content[:half])
    if half:
        file.flush()
        failpoint(name)
    file.write(content[half:])
