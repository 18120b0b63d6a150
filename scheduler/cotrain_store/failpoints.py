"""Named moments at which a test lets this process die, stop, fail or dawdle. Off unless asked for.

`COTRAIN_FAILPOINTS=name=action[@nth],…` asks: at the `nth` time (1 by default) that the moment is
reached, the action happens, once. `COTRAIN_FAILPOINTS_LOG=<file>` notes every moment reached, one line
`<name> <pid>` each. With it `nth` counts over all processes that share the file, so a restarted process
goes past the moment at which its predecessor died; without it each process counts for itself.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

FAILPOINTS: Mapping[str, str] = MappingProxyType(
    {
        "api.before_submit": "A request is checked and its body stored, but not in the log.",
        "api.after_submit": "A request is in the log, and its client does not know.",
        "api.before_answer": "A result was read, and its client has not got it.",
        "spool.before_write": "Bodies wait to be written to a segment.",
        "spool.half_written": "Half a record is in a segment.",
        "spool.before_sync": "Records are written and not durable.",
        "spool.after_sync": "Records are durable, and nobody knows where they are.",
        "scheduler.before_plan": "A cycle is chosen and not written.",
        "scheduler.after_plan": "A cycle is written, and its scheduler does not know.",
        "reassign.before": "A place is taken for dead, and still holds its work.",
        "reassign.after": "A dead place's work was given away, and the scheduler does not know.",
        "worker.entered": "A worker took its place: its predecessor is fenced off.",
        "worker.replayed": "A run was brought back from its log.",
        "worker.before_run": "A step was read and not begun.",
        "worker.after_run": "A step was computed; memory is ahead of the log.",
        "worker.before_commit": "A step is about to be committed.",
        "worker.after_commit": "A step was committed, and its worker does not know.",
        "worker.before_risk": "A suspected request is about to be run alone.",
        "worker.after_risk": "A suspected request was survived, and that is not noted.",
        "snapshot.before_write": "A run was copied to the host for its recovery copy.",
        "snapshot.half_written": "Half a recovery copy is in its temporary file.",
        "snapshot.before_rename": "A recovery copy is whole under its temporary name.",
        "snapshot.renamed": "A recovery copy has its name, which is not durable.",
        "snapshot.before_register": "A recovery copy is durable, and the log is not cut.",
        "snapshot.registered": "The log was cut; copies that are too old are still there.",
        "weights.half_written": "Half a save's adapter is in its temporary folder.",
        "weights.before_rename": "A save's adapter is whole under its temporary name.",
        "weights.renamed": "A save's adapter has its name, and nobody knows.",
        "weights.before_stored": "A save's files are durable, and the log does not know.",
        "weights.stored": "A save's files are known, and its worker does not know.",
        "optimizer.half_written": "Half a save's optimizer state is in its temporary file.",
        "optimizer.before_rename": "A save's optimizer state is whole under its temporary name.",
        "optimizer.renamed": "A save's optimizer state has its name, and nobody knows.",
        "external.half_written": "Some files of an export are encrypted.",
        "external.before_rename": "An export is whole under its temporary name.",
        "external.renamed": "An export has its name, and nobody knows.",
        "sample.claimed": "Sample requests were claimed, and their worker does not know.",
        "sample.before_resolve": "Samples are drawn and not stored.",
        "sample.after_resolve": "Samples are stored, and their worker does not know.",
    }
)

_FAULT = re.compile(r"([a-z_.]+)=(kill|stop|error|sleep:(\d+(?:\.\d+)?))(?:@([1-9]\d*))?")


@dataclass(frozen=True)
class Fault:
    """What happens at the `nth` time that a moment is reached."""

    action: str
    nth: int
    sleep_s: float = 0.0

    def strike(self, name: str) -> None:
        """Do it; raises OSError for an `error`."""
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "error":
            raise OSError(errno.ENOSPC, f"Failpoint {name}")
        time.sleep(self.sleep_s)


def parse_faults(text: str) -> dict[str, Fault]:
    """Read `name=action[@nth],…`; raises ValueError for what is no fault at a moment there is."""
    faults = {}
    for one in text.split(","):
        match = _FAULT.fullmatch(one.strip())
        if not match or match[1] not in FAILPOINTS:
            raise ValueError(f"COTRAIN_FAILPOINTS: {one!r} is no fault at a known moment.")
        name, action, sleep_s, nth = match.groups()
        faults[name] = Fault(action.partition(":")[0], int(nth or 1), float(sleep_s or 0))
    return faults


class Faults:
    """The faults asked for, and how often each moment was reached."""

    def __init__(self, faults: Mapping[str, Fault], log: str | None) -> None:
        self._faults = faults
        self._log = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600) if log else None
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def asked_for(cls, environ: Mapping[str, str]) -> Faults | None:
        """Read the environment; None when nothing is asked for."""
        text, log = environ.get("COTRAIN_FAILPOINTS"), environ.get("COTRAIN_FAILPOINTS_LOG")
        return cls(parse_faults(text) if text else {}, log) if text or log else None

    def reach(self, name: str) -> None:
        """Note a moment, and strike if it is time. Raises ValueError for a name nobody registered."""
        if name not in FAILPOINTS:
            raise ValueError(f"{name!r} is no failpoint.")
        with self._lock:
            self._reached[name] += 1
            count = self._note(name) if self._log is not None else self._reached[name]
        fault = self._faults.get(name)
        if fault and fault.nth == count:
            fault.strike(name)

    def _note(self, name: str) -> int:
        """Append a line; return how many lines of this name there are up to it."""
        assert self._log is not None
        os.write(self._log, f"{name} {os.getpid()}\n".encode())
        if name not in self._faults:
            return 0
        end = os.lseek(self._log, 0, os.SEEK_CUR)  # an append leaves the offset behind its own line
        lines = os.pread(self._log, end, 0).split(b"\n")
        return sum(line.startswith(name.encode() + b" ") for line in lines)


_FAULTS = Faults.asked_for(os.environ)


def failpoint(name: str) -> None:
    """Mark a moment of FAILPOINTS."""
    if _FAULTS is not None:
        _FAULTS.reach(name)


def write_past(name: str, file: BinaryIO, content: bytes) -> None:
    """Write `content`; where failpoints are on, the moment `name` lies between its halves."""
    half = len(content) // 2 if _FAULTS is not None else 0
    file.write(content[:half])
    if half:
        file.flush()
        failpoint(name)
    file.write(content[half:])
