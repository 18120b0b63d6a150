"""Recovery copies of runs, and the policy of taking them and of evicting runs.

Copies are written whole or not at all, and checked when read. A key is `<run digest>/<seq>-<writer>.safetensors`.
The writer is a worker and its epoch. A replaced worker therefore never overwrites a file of its successor, or of a
worker to which its runs were reassigned. The policy is pure.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safetensors.torch import load, save

from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable, Moments
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId
from cotrain_workers.checkpoints.peft_folder import metadata_of, read_metadata
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.spec import AdapterSpec

FORMAT = "cotrain-snapshot-1"
SUFFIX = ".safetensors"
_MOMENTS = Moments("snapshot.half_written", "snapshot.before_rename", "snapshot.renamed")
ARENAS = ("weights", "grads", "m", "v")


class SnapshotUnreadable(Exception):
    """Error: a snapshot file is missing, torn, or of another run."""


@dataclass(frozen=True)
class Snapshot:
    """Complete file: its path below the snapshots folder, and the digest of its bytes."""

    file: str
    sha256: str
    size: int


def write_snapshot(root: Blobs, run: str, seq: int, writer: str, numerics_id: str, state: AdapterState) -> Snapshot:
    """Write a run's state as of `seq`, durable under its final name when this returns; raises OSError."""
    content = encode_snapshot(run, seq, numerics_id, state)
    name = f"{run_folder(run)}/{seq}-{writer}{SUFFIX}"
    failpoint("snapshot.before_write", run)
    root.put(name, content, moments=_MOMENTS)
    return Snapshot(name, hashlib.sha256(content).hexdigest(), len(content))


def read_snapshot(root: Blobs, file: str, sha256: str, run: str, seq: int) -> AdapterState:
    """Read a run's state back.

    Raises:
        SnapshotUnreadable: the bytes are not those that were registered for this run and seq.
        OSError: this process cannot read any file now.
    """
    try:
        content = root.get(file)
    except OSError as missing:
        if passes(missing):
            raise
        raise SnapshotUnreadable(f"Snapshot {file} cannot be read: {missing}.") from missing
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SnapshotUnreadable(f"Snapshot {file} does not match its digest.")
    header, state = decode_snapshot(content)
    if (header["format"], header["run"], header["seq"]) != (FORMAT, run, str(seq)):
        raise SnapshotUnreadable(f"Snapshot {file} is not of run {run} at seq {seq}.")
    return state


def encode_snapshot(run: str, seq: int, numerics_id: str, state: AdapterState) -> bytes:
    """Return a run's state as of `seq` as safetensors: the four arenas, and the other fields as metadata."""
    header = {
        "format": FORMAT,
        "run": run,
        "seq": str(seq),
        "numerics_id": numerics_id,
        "spec": json.dumps(state.spec.stored()),
        "step": str(state.step),
        "grads_pending": str(int(state.grads_pending)),
    }
    content: bytes = save({name: getattr(state, name) for name in ARENAS}, header)
    return content


def decode_snapshot(content: bytes) -> tuple[Mapping[str, str], AdapterState]:
    """Return the header and the state of `encode_snapshot`; the header has `run` and `seq`."""
    header = metadata_of(content)
    return header, AdapterState(
        spec=AdapterSpec(**json.loads(header["spec"])),
        step=int(header["step"]),
        grads_pending=header["grads_pending"] == "1",
        **load(content),
    )


def remove_snapshots(root: Blobs, run: str, keep: frozenset[str] = frozenset()) -> None:
    """Delete a run's files except those in `keep`. Idempotent. Raises OSError."""
    for blob in root.list(run_folder(run)):
        if blob.key not in keep:
            root.delete(blob.key)


def orphans(
    root: Blobs, bases: Callable[[RunId], frozenset[str]], is_at_work: Callable[[str, str], bool]
) -> dict[str, str]:
    """Find the removable files, each with its mark: partial files of crashed processes, and files that no log
    starts from.

    A file exists before it is registered. `is_at_work` returns True for a run's folder and a writer that may be
    about to register one. `bases` returns a run's registered files. A damaged file has no run, and stays.
    """
    return {
        blob.key: blob.mark
        for blob in root.list()
        if not is_at_work(blob.key.partition("/")[0], _writer(blob.key))
        and (blob.is_unfinished or _is_orphan(root, blob.key, bases))
    }


def _writer(key: str) -> str:
    """Return the writer of a file, with any suffix of its name removed."""
    return key.rpartition("/")[2].partition("-")[2].partition(SUFFIX)[0]


def _is_orphan(root: Blobs, key: str, bases: Callable[[RunId], frozenset[str]]) -> bool:
    try:
        run = read_metadata(root, key)["run"]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError):
        return False
    return key not in bases(RunId(run))


def run_folder(run: str) -> str:
    """Return the folder of a run's files."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]


#: Maximum length of a log, however cheap its replay. A run that only evaluates would otherwise
#: keep a line for every forward that it requested.
LOG_ENTRIES = 4_096
#: A copy saves at least this many times the seconds that it takes to write.
LEAST_GAIN = 4.0
#: Fraction of the bound at which copies begin. Training continues during the write, and is replayed, too.
BEGIN_AT = 0.75


@dataclass(frozen=True)
class ReplayCost:
    """Minimum times of a replay, which runs the ops of one run alone, in s.

    A pass reads the whole base model. In a cycle, passes of many runs share that time. Alone, each takes all of it.
    """

    pass_s: float = 0.0  # minimum time of a pass alone in s
    step_s: float = 0.0  # minimum time of an optimizer step alone in s

    def alone_s(self, compute_s: float, part: float, *, is_pass: bool) -> float:
        """Return the time alone of an op that took `compute_s`, the `part` (0 to 1) of its cycle's time."""
        floor_s = self.pass_s if is_pass else self.step_s
        return compute_s + floor_s * (1.0 - min(1.0, part))


UNMEASURED = ReplayCost()


@dataclass
class ReplayBacklog:
    """Work of a run that would be repeated if this worker crashed now."""

    seq: int  # last committed seq: a copy taken now would cover it
    ops: int = 0
    bytes: int = 0
    compute_s: float = 0.0  # time of these ops in s, in cycles with other runs
    replay_s: float = 0.0  # time of their replay in s, alone
    is_due: bool = False  # True if a copy must be taken at once, independent of the replay time
    used_at: float = 0.0
    entries: int = 0
    """Log entries since the last copy, including those without an effect on the state."""
    copy_s: float = 0.0  # writing time of the last copy in s

    def add(self, seq: int, size: int, compute_s: float, replay_s: float, now: float) -> None:
        """Count one committed op."""
        self.pass_by(seq, now)
        self.ops += 1
        self.bytes += size
        self.compute_s += compute_s
        self.replay_s += replay_s

    def pass_by(self, seq: int, now: float) -> None:
        """Count one committed op without an effect on the state."""
        self.seq, self.used_at = seq, now
        self.entries += 1


@dataclass(frozen=True)
class SnapshotPolicy:
    """Conditions of copying a run out and of evicting it. Operators only set `replay_s`."""

    replay_s: float = 30.0
    """Copy runs out before replaying all their logs, one after the other, takes this long. Copy out a run that would…"""
    ops: int = 512  # number of ops to replay at which a copy is due
    bytes: int = 256 * 1024**2  # bytes of bodies to replay at which a copy is due
    idle_s: float = 600.0  # idle time in s after which a changed run is copied out
    evict_idle_s: float = 1800.0
    """Idle time in s after which a run is evicted from memory; its next request restores it."""

    def due_s(self, backlog: ReplayBacklog) -> float:
        """Return at how long a replay of one run a copy of it is due, in s."""
        return max(self.replay_s, LEAST_GAIN * backlog.copy_s)

    def needs_snapshot(self, backlog: ReplayBacklog, now: float) -> bool:
        """Return True if a snapshot is due: replay would exceed the time, op or disk limit, or the run is idle."""
        if backlog.entries >= LOG_ENTRIES:
            return True
        if not backlog.ops:
            return False
        return (
            backlog.is_due
            or backlog.replay_s >= self.due_s(backlog)
            or backlog.ops >= self.ops
            or backlog.bytes >= self.bytes
            or now - backlog.used_at >= self.idle_s
        )

    def runs_due(self, backlogs: Mapping[RunId, ReplayBacklog], now: float) -> list[RunId]:
        """Return the runs to copy out now.

        These are the runs that need a copy whatever the others cost. The costliest others follow, until a replay of
        the rest stays below the bound. A run waits while writing its copy takes more than a quarter of its replay.
        """
        due = [run for run in backlogs if self.needs_snapshot(backlogs[run], now)]
        others = backlogs.keys() - due
        left_s = sum(backlogs[run].replay_s for run in others)
        if left_s >= BEGIN_AT * self.replay_s:
            for run in sorted(others, key=lambda run: (-backlogs[run].replay_s, run)):
                backlog = backlogs[run]
                if left_s < BEGIN_AT * self.replay_s:
                    break
                if backlog.ops and backlog.replay_s >= LEAST_GAIN * backlog.copy_s:
                    due.append(run)
                    left_s -= backlog.replay_s
        return due

    def may_evict(self, backlog: ReplayBacklog, now: float) -> bool:
        """Return True if a run has been idle long enough, with nothing to replay, to free its memory."""
        return not backlog.ops and now - backlog.used_at >= self.evict_idle_s
