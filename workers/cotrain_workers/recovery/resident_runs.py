"""Resident runs of one worker, and their recovery copies: restore, copy out, evict.

Copies are taken between cycles (a copy to host memory) and written by a background thread, so that
training never waits for a disk.
"""

import time
from collections.abc import Container, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import structlog

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import OpId, RunId, seq_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import RunState
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.oplog.execution import Execution
from cotrain_store.settings.worker import WorkerSettings
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.adapters.bank import AdapterState, StateCopy
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.ops import WeightsMissing
from cotrain_workers.group.engine import Arrived, Trainer
from cotrain_workers.recovery.orphan_sweep import Sweep
from cotrain_workers.recovery.replay import Replay, Restored, RestoreProgress, bases_of, is_foreign
from cotrain_workers.recovery.snapshot_file import (
    ReplayBacklog,
    ReplayCost,
    Snapshot,
    SnapshotPolicy,
    remove_snapshots,
    write_snapshot,
)

log = structlog.get_logger()

#: Maximum number of copies in host memory that wait for the disk.
COPIES_AT_ONCE = 4
_PASSES = (OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)
#: These do not change the state of their run.
_WITHOUT_EFFECT = (OpKind.FORWARD, OpKind.SAVE, OpKind.METRICS, OpKind.REJECTED)


class ResidentRuns:
    """Owner of the runs in the engine's memory and of their recovery copies."""

    def __init__(
        self,
        engine: Trainer,
        execution: Execution,
        weights: WeightsStore,
        settings: WorkerSettings,
        policy: SnapshotPolicy,
        metrics: WorkerMetrics,
        cost: ReplayCost,
        *,
        exact: bool,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._weights = weights
        self._policy = policy
        self._metrics = metrics
        self._snapshots = settings.blob_store.below("snapshots")
        self._cost = cost
        self.progress = RestoreProgress()
        self._replay = Replay(engine, execution, weights, self._snapshots, self.progress, exact)
        self._backlogs: dict[RunId, ReplayBacklog] = {}
        self._writing: dict[RunId, tuple[int, Future[tuple[Snapshot, float]]]] = {}
        self._rewound = set[RunId]()  # runs in memory whose REWIND is not committed
        self._uncovered_s: dict[RunId, float] = {}
        """Training in copies that are taken and not yet registered, whether they can be written or not."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._sweep = Sweep(execution, settings)

    @property
    def runs(self) -> int:
        """Number of runs in memory."""
        return len(self._backlogs)

    @property
    def snapshot_age(self) -> tuple[float, float]:
        """Largest training time of a run without a recovery copy, and the time at which a copy is due, both in s.

        Any thread may read it.
        """
        ages = [
            (backlog.compute_s + self._uncovered_s.get(run, 0.0), self._policy.due_s(backlog))
            for run, backlog in list(self._backlogs.items())
            if not backlog.is_due
        ]
        return max(ages, default=(0.0, self._policy.replay_s))

    def ensure(self, run: RunId) -> Yielding[Restored | None]:
        """Load a run into the engine, restored if necessary. Return None if it was in memory.

        Yields after each micro-batch of the replay. A copy of a replayed run is due afterwards (`copy_due`).

        Raises:
            ReplayDiverged, SpoolCorrupt: the run cannot continue.
        """
        if run in self._backlogs:
            return None
        self._await_copy(run)
        self._weights.reload()
        restored = yield from self._replay.restore(run)
        position = restored.position
        backlog = ReplayBacklog(position.done, ops=restored.replayed, used_at=time.monotonic())
        backlog.entries = position.done - position.snap
        # Copy it out, so that a successor does not replay it again. A state with other last bits waits for
        # the commit that marks it.
        backlog.is_due = restored.replayed > 0 and restored.is_exact
        if is_foreign(self._engine, position.numerics_id):
            backlog.is_due = True  # a log mixes no numerics
        if not restored.from_newest:
            # The newest copy is damaged, so another one is due.
            backlog.ops, backlog.is_due = max(1, backlog.ops), True
        self._backlogs[run] = backlog
        return restored

    def rewind(self, run: RunId, last: int) -> Yielding[None]:
        """Replace a run in memory by its state as of an earlier op, before the commit of its REWIND.

        Yields like `ensure`. Raises ReplayDiverged or SpoolCorrupt; the run is not in memory then.
        """
        self._await_copy(run)
        done = self._backlogs.pop(run).seq  # without a backlog, no copy of it is taken now
        position = self._execution.logs.position(run)
        if position is None:
            raise SpoolCorrupt(f"Run {run} has no log.")
        yield from self._replay.restore_at(run, position, last)
        self._backlogs[run] = ReplayBacklog(done, used_at=time.monotonic())
        self._rewound.add(run)

    def to_replay(self, run: RunId) -> int | None:
        """Return the number of ops between a run's newest copy and its last commit; None if there is
        nothing to restore.
        """
        position = None if run in self._backlogs else self._execution.logs.position(run)
        if position is None or (position.done == position.snap and not position.snapshot_file):
            return None
        return position.done - position.snap

    def logged(self, run: RunId) -> list[QueuedOp]:
        """Return the ops that a restore of this run may execute; none if it is in memory.

        Raises SpoolCorrupt if one of them is missing.
        """
        position = None if run in self._backlogs else self._execution.logs.position(run)
        if position is None:
            return []
        first = min(base.seq for base in bases_of(position)) + 1 if bases_of(position) else 0
        return self._execution.logs.logged_ops(run, first, position.done)

    def copy_due(self) -> None:
        """Register written copies and start due ones. No run in memory may be ahead of its log."""
        self._register_finished()
        free = {run: each for run, each in self._backlogs.items() if run not in self._writing}
        for run in self._policy.runs_due(free, time.monotonic()):
            self._copy_out(run, free[run])

    def roll_back(self, run: RunId) -> bool:
        """Replace the lost newest state of a run by its newest readable checkpoint. Return False if it has none.

        The run is not in memory then: `ensure` restores it. A rollback is never silent. The run's `weights_epoch` grows,
        and requests for the lost state fail with that reason; later ones run. Idempotent: a repeated call finds a
        readable snapshot.

        Raises:
            OSError: the snapshot cannot be written now.
            Fenced: another process took over this worker id.
        """
        self.forget_state(run)
        # A copy of the lost state, not registered because the log holds an unstored save.
        self._writing.pop(run, None)
        execution, position = self._execution, self._execution.logs.position(run)
        if position is None or position.state is RunState.FAILED:
            return False
        for checkpoint in execution.logs.checkpoints(run):
            ref = checkpoint.weights
            if seq_of(ref) > position.done:
                continue
            try:
                adapter, moments = self._weights.host(ref), self._weights.optimizer(ref)
            except WeightsMissing:
                continue
            state = AdapterState.of(adapter.spec, adapter, moments)
            numerics, writer = self._engine.facts.numerics_id, execution.writer
            snapshot = write_snapshot(self._snapshots, run, position.done, writer, numerics, state)
            failpoint("worker.before_rollback", run)
            epoch = execution.roll_back(checkpoint, snapshot.file, snapshot.sha256)
            failpoint("worker.after_rollback", run)
            log.error("run_rolled_back", run=run, checkpoint=checkpoint.path, weights_epoch=epoch)
            return True
        return False

    def done(self, run: RunId) -> int:
        """Return the last seq whose effect is in memory; -1 for a run that is not in memory."""
        backlog = self._backlogs.get(run)
        return backlog.seq if backlog else -1

    def forget_state(self, run: RunId) -> None:
        """Drop a run from memory, so that `ensure` restores it from its log."""
        self._engine.adapters.drop(run)
        self._backlogs.pop(run, None)
        self._rewound.discard(run)
        self._uncovered_s.pop(run, None)

    def committed(self, step: Step, outputs: Container[OpId], device_s: Mapping[OpId, float]) -> None:
        """Count a committed step. Copy out runs whose log has grown long.

        An op without an output has not finished; `device_s` is the compute time of each op.
        """
        now, total_s = time.monotonic(), sum(device_s.values()) or 1.0
        for op in step.ops:
            backlog = self._backlogs.get(op.run)
            if backlog is None:
                continue
            if (op.run, op.seq) not in outputs:
                backlog.used_at = now
            elif op.kind in _WITHOUT_EFFECT:
                backlog.pass_by(op.seq, now)
            elif op.kind is OpKind.REWIND:
                backlog.pass_by(op.seq, now)
                if op.run in self._rewound:  # the copies after its state are gone
                    backlog.ops, backlog.is_due = backlog.ops + 1, True
                    self._rewound.discard(op.run)
            else:
                compute_s, is_pass = device_s[op.run, op.seq], op.kind in _PASSES
                alone_s = self._cost.alone_s(compute_s, compute_s / total_s, is_pass=is_pass)
                backlog.add(op.seq, op.size, compute_s, alone_s, now)
        self.copy_due()

    def maintain(self) -> None:
        """Run periodic maintenance: register snapshots, start new ones, evict runs, sweep."""
        now = time.monotonic()
        self.copy_due()
        for run, backlog in list(self._backlogs.items()):
            if self._policy.may_evict(backlog, now) and run not in self._writing:
                self.forget_state(run)
                log.info("run_evicted", run=run)
        for name in self._engine.adapters.runs_to_evict():
            # A pass that loses its run here would start anew in every cycle.
            if name not in self._engine.open_passes.runs:
                self._evict(RunId(name))
        for run in self._execution.runs_to_drop():
            if run not in self._writing and self._execution.forget(run):
                self.forget_state(run)
                remove_snapshots(self._snapshots, run)
                log.info("run_dropped", run=run)
        self._sweep.maintain(now, self._writing)

    def is_copied(self, run: RunId) -> bool:
        """Return True if a registered copy contains all committed ops of a run in memory; otherwise start one."""
        backlog, position = self._backlogs[run], self._execution.logs.position(run)
        if position is not None and position.snap == backlog.seq:
            return True
        self._copy_out(run, backlog)
        return False

    def hand_over(self) -> None:
        """Copy out changed runs and release completely copied ones, because another worker continues them."""
        for run, backlog in list(self._backlogs.items()):
            if backlog.ops:
                self._copy_out(run, backlog)
            elif run not in self._writing:
                self.forget_state(run)
                log.info("run_handed_over", run=run)

    def drain(self, deadline_s: float) -> None:
        """Copy out every changed run, so that the next start has nothing to replay."""
        until = time.monotonic() + deadline_s
        # A run can have changed since a copy in progress was taken, and has one copy at a time.
        self.await_writes(until)
        self._register_finished()
        for run, backlog in sorted(self._backlogs.items(), key=lambda item: -item[1].replay_s):
            if backlog.ops:
                while self._is_busy and time.monotonic() < until:
                    self._wait_for_one(until)
                self._copy_out(run, backlog)
        self.await_writes(until)
        self._register_finished()
        self._writer.shutdown(wait=False, cancel_futures=True)

    def await_writes(self, until: float) -> None:
        """Wait for the copies in progress, until a time of the monotonic clock."""
        wait(self._unwritten, max(0.0, until - time.monotonic()))

    @property
    def _unwritten(self) -> list[Future[tuple[Snapshot, float]]]:
        return [writing for _, writing in self._writing.values() if not writing.done()]

    @property
    def _is_busy(self) -> bool:
        """Return True if the disk is behind: each waiting copy takes a run's size of memory."""
        return len(self._unwritten) >= COPIES_AT_ONCE

    def _wait_for_one(self, until: float) -> None:
        wait(self._unwritten, max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)

    def _await_copy(self, run: RunId) -> None:
        """Wait until a run's copy in progress is registered, because it may be its newest state."""
        if run in self._writing:
            wait([self._writing[run][1]])
            self._register_finished()

    def _evict(self, run: RunId) -> None:
        """Drop a run that does not fit into host memory, as soon as a copy contains all of it."""
        backlog = self._backlogs.get(run)
        if backlog is None or run in self._writing:
            return
        if backlog.ops:
            self._copy_out(run, backlog)
        else:
            self.forget_state(run)
            log.info("run_evicted", run=run, reason="host_bytes")

    def _copy_out(self, run: RunId, backlog: ReplayBacklog) -> None:
        if run in self._writing or self._is_busy or run not in self._engine.adapters:
            return
        copy = self._engine.adapters.copy_out(run)
        numerics = self._engine.facts.numerics_id
        root, writer = self._snapshots, self._execution.writer
        writing = self._writer.submit(_write, root, run, backlog.seq, writer, numerics, copy)
        self._writing[run] = (backlog.seq, writing)
        if not backlog.is_due:
            self._uncovered_s[run] = self._uncovered_s.get(run, 0.0) + backlog.compute_s
        self._backlogs[run] = ReplayBacklog(seq=backlog.seq, used_at=backlog.used_at, copy_s=backlog.copy_s)

    def _register_finished(self) -> None:
        for run, (seq, writing) in list(self._writing.items()):
            unstored = self._weights.first_unstored(run)
            if not writing.done() or (unstored is not None and unstored <= seq):
                continue  # until a save is on disk, only a replay of the log can recreate it
            try:
                snapshot, copy_s = writing.result()
            except OSError as failed:
                del self._writing[run]
                log.error("snapshot_failed", run=run, reason=str(failed))
                if run in self._backlogs:
                    self._backlogs[run].ops += 1  # still to be copied out
                continue
            failpoint("snapshot.before_register", run)
            registered = self._execution.register_snapshot(run, seq, snapshot.file, snapshot.sha256, snapshot.size)
            # Clear it only now: while Redis is unavailable the copy stays finished and
            # unregistered.
            del self._writing[run]
            self._uncovered_s.pop(run, None)
            self._metrics.snapshot_duration.observe(copy_s)
            if run in self._backlogs:
                self._backlogs[run].copy_s = copy_s
            if registered:
                failpoint("snapshot.registered", run)
                self._keep_two(run)
                log.info("snapshot_registered", run=run, seq=seq, size=snapshot.size)

    def _keep_two(self, run: RunId) -> None:
        position = self._execution.logs.position(run)
        if position:
            keep = frozenset({position.snapshot_file, position.older_file})
            remove_snapshots(self._snapshots, run, keep)


def _write(
    root: Blobs, run: RunId, seq: int, writer: str, numerics_id: str, copy: StateCopy | Arrived
) -> tuple[Snapshot, float]:
    """Write a snapshot once its state has arrived; return it and the writing time in s."""
    began = time.perf_counter()
    snapshot = write_snapshot(root, run, seq, writer, numerics_id, copy.state())
    return snapshot, time.perf_counter() - began
