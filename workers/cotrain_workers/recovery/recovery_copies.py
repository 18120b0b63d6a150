"""Recovery copies of the runs in memory: when a copy is due, and its writing in the background.

Copies are taken between cycles (a copy to host memory) and written by a background thread, so that
training never waits for a disk. The policy is pure.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import structlog

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import OpId, RunId
from cotrain_store.messages.ops import OpKind, Step
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.oplog.execution import Execution
from cotrain_workers.checkpoints.state_files import Snapshot, remove_snapshots, write_snapshot
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.adapters.copies import StateCopy
from cotrain_workers.group.engine import WorkerEngine

log = structlog.get_logger()

#: Maximum number of copies in host memory that wait for the disk.
COPIES_AT_ONCE = 4
_PASSES = (OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)
#: These do not change the state of their run.
_WITHOUT_EFFECT = (OpKind.FORWARD, OpKind.SAVE, OpKind.METRICS, OpKind.REJECTED)
#: Maximum length of a log, however cheap its replay. A run that only evaluates would otherwise
#: keep a line for every forward that it requested.
LOG_ENTRIES = 4_096
#: A copy saves at least this many times the seconds that it takes to write.
LEAST_GAIN = 4.0
#: Fraction of the bound at which copies begin. Training continues during the write, and is replayed, too.
BEGIN_AT = 0.75


class RecoveryCopies:
    """Recovery copies of one worker's runs."""

    def __init__(
        self,
        engine: WorkerEngine,
        execution: Execution,
        weights: WeightsStore,
        snapshots: Blobs,
        policy: SnapshotPolicy,
        metrics: WorkerMetrics,
        cost: ReplayCost,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._weights = weights
        self._snapshots = snapshots
        self._policy = policy
        self._metrics = metrics
        self._cost = cost
        self.backlogs: dict[RunId, ReplayBacklog] = {}
        """Each run in memory, with its work that no copy contains."""
        self.writing: dict[RunId, tuple[int, Future[tuple[Snapshot, float]]]] = {}
        """Copies that are taken and not yet registered, each with its seq."""
        self._uncovered_s: dict[RunId, float] = {}
        """Training in copies that are taken and not yet registered, whether they can be written or not."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    @property
    def snapshot_age(self) -> tuple[float, float]:
        """Largest training time of a run without a recovery copy, and the time at which a copy is due, both in s.

        Any thread may read it.
        """
        ages = [
            (backlog.compute_s + self._uncovered_s.get(run, 0.0), self._policy.due_s(backlog))
            for run, backlog in list(self.backlogs.items())
            if not backlog.is_due
        ]
        return max(ages, default=(0.0, self._policy.replay_s))

    def forget(self, run: RunId) -> None:
        """Drop the backlog of a run that leaves memory."""
        self.backlogs.pop(run, None)
        self._uncovered_s.pop(run, None)

    def committed(self, step: Step, outputs: Container[OpId], device_s: Mapping[OpId, float]) -> None:
        """Count a committed step. Copy out runs whose log has grown long.

        An op without an output has not finished; `device_s` is the compute time of each op.
        """
        now, total_s = time.monotonic(), sum(device_s.values()) or 1.0
        for op in step.ops:
            backlog = self.backlogs.get(op.run)
            if backlog is None:
                continue
            if op.id not in outputs:
                backlog.used_at = now
            elif op.kind in _WITHOUT_EFFECT:
                backlog.pass_by(op.seq, now)
            elif op.kind is OpKind.REWIND:
                backlog.pass_by(op.seq, now)
                if backlog.is_rewound:  # the copies after its state are gone
                    backlog.ops, backlog.is_due, backlog.is_rewound = backlog.ops + 1, True, False
            else:
                compute_s, is_pass = device_s[op.id], op.kind in _PASSES
                alone_s = self._cost.alone_s(compute_s, compute_s / total_s, is_pass=is_pass)
                backlog.add(op.seq, op.size, compute_s, alone_s, now)
        self.copy_due()

    def copy_due(self) -> None:
        """Register written copies and start due ones. No run in memory may be ahead of its log."""
        self._register_finished()
        free = {run: each for run, each in self.backlogs.items() if run not in self.writing}
        for run in self._policy.runs_due(free, time.monotonic()):
            self.start(run, free[run])

    def is_copied(self, run: RunId) -> bool:
        """Return True if a registered copy contains all committed ops of a run in memory; otherwise start one."""
        backlog, position = self.backlogs[run], self._execution.logs.position(run)
        if position is not None and position.snap == backlog.seq:
            return True
        self.start(run, backlog)
        return False

    def start(self, run: RunId, backlog: ReplayBacklog) -> None:
        """Start to copy a run out, unless a copy of it is in progress or the disk is behind.

        A rewound run waits for the commit of its REWIND: its state is older than the seq that its copy would cover.
        """
        if run in self.writing or self._is_busy or backlog.is_rewound or run not in self._engine.adapters:
            return
        copy = self._engine.adapters.copy_out(run)
        numerics = self._engine.facts.numerics_id
        root, writer = self._snapshots, self._execution.writer
        writing = self._writer.submit(_write, root, run, backlog.seq, writer, numerics, copy)
        self.writing[run] = (backlog.seq, writing)
        if not backlog.is_due:
            self._uncovered_s[run] = self._uncovered_s.get(run, 0.0) + backlog.compute_s
        self.backlogs[run] = ReplayBacklog(seq=backlog.seq, used_at=backlog.used_at, copy_s=backlog.copy_s)

    def await_copy(self, run: RunId) -> None:
        """Wait until a run's copy in progress is registered, because it may be its newest state."""
        if run in self.writing:
            wait([self.writing[run][1]])
            self._register_finished()

    def drain(self, deadline_s: float) -> None:
        """Copy out every changed run, so that the next start has nothing to replay."""
        until = time.monotonic() + deadline_s
        # A run can have changed since a copy in progress was taken, and has one copy at a time.
        self.await_writes(until)
        self._register_finished()
        for run, backlog in sorted(self.backlogs.items(), key=lambda item: -item[1].replay_s):
            if backlog.ops:
                while self._is_busy and time.monotonic() < until:
                    wait(self._unwritten, max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)
                self.start(run, backlog)
        self.await_writes(until)
        self._register_finished()
        self._writer.shutdown(wait=False, cancel_futures=True)

    def await_writes(self, until: float) -> None:
        """Wait for the copies in progress, until a time of the monotonic clock."""
        wait(self._unwritten, max(0.0, until - time.monotonic()))

    @property
    def _unwritten(self) -> list[Future[tuple[Snapshot, float]]]:
        return [writing for _, writing in self.writing.values() if not writing.done()]

    @property
    def _is_busy(self) -> bool:
        """True if the disk is behind: each waiting copy takes a run's size of memory."""
        return len(self._unwritten) >= COPIES_AT_ONCE

    def _register_finished(self) -> None:
        for run, (seq, writing) in list(self.writing.items()):
            unstored = self._weights.first_unstored(run)
            if not writing.done() or (unstored is not None and unstored <= seq):
                continue  # until a save is on disk, only a replay of the log can recreate it
            try:
                snapshot, copy_s = writing.result()
            except OSError as failed:
                del self.writing[run]
                log.error("snapshot_failed", run=run, reason=str(failed))
                if run in self.backlogs:
                    self.backlogs[run].ops += 1  # still to be copied out
                continue
            failpoint("snapshot.before_register", run)
            registered = self._execution.register_snapshot(run, seq, snapshot.file, snapshot.sha256, snapshot.size)
            # Clear it only now: while Redis is unavailable the copy stays finished and
            # unregistered.
            del self.writing[run]
            self._uncovered_s.pop(run, None)
            self._metrics.snapshot_duration.observe(copy_s)
            if run in self.backlogs:
                self.backlogs[run].copy_s = copy_s
            if registered:
                failpoint("snapshot.registered", run)
                self._keep_two(run)
                log.info("snapshot_registered", run=run, seq=seq, size=snapshot.size)

    def _keep_two(self, run: RunId) -> None:
        position = self._execution.logs.position(run)
        if position:
            keep = frozenset({position.snapshot_file, position.older_file})
            remove_snapshots(self._snapshots, run, keep)


def _write(root: Blobs, run: RunId, seq: int, writer: str, numerics_id: str, copy: StateCopy) -> tuple[Snapshot, float]:
    """Write a snapshot once its state has arrived; return it and the writing time in s."""
    began = time.perf_counter()
    snapshot = write_snapshot(root, run, seq, writer, numerics_id, copy.state())
    return snapshot, time.perf_counter() - began


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
    is_rewound: bool = False  # True if its state is that of a REWIND that is not committed

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
    """Limit in s of a replay: of one run alone, and of all runs together, one after the other."""
    ops: int = 512  # number of ops to replay at which a copy is due
    bytes: int = 256 * 1024**2  # bytes of bodies to replay at which a copy is due
    idle_s: float = 600.0  # idle time in s after which a changed run is copied out
    evict_idle_s: float = 1800.0
    """Idle time in s after which a run is evicted from memory; its next request restores it."""

    def due_s(self, backlog: ReplayBacklog) -> float:
        """Return the replay time in s of one run at which a copy of it is due."""
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


#: Cost of a replay in tests, which measure none.
UNMEASURED = ReplayCost()
