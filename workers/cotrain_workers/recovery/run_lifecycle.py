"""Runs of one worker: restored for a step, rewound, rolled back, stopped one by one, evicted, handed over."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import structlog

from cotrain_store.bodies.adapter_bodies import LoadRequest
from cotrain_store.disk.stored_results import RUN_STOPPED
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import OpId, RunId, TenantId, seq_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import RunState, WeightsRecord
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.oplog.execution import Execution
from cotrain_store.settings import WorkerSettings
from cotrain_workers.checkpoints.state_files import remove_snapshots, write_snapshot
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.ops import Failure, NoteOutput, WeightsMissing
from cotrain_workers.group.engine import WorkerEngine
from cotrain_workers.recovery.orphan_sweep import OrphanSweep
from cotrain_workers.recovery.recovery_copies import RecoveryCopies, ReplayBacklog, ReplayCost, SnapshotPolicy
from cotrain_workers.recovery.replay import (
    Replay,
    ReplayDiverged,
    Restored,
    RestoreProgress,
    is_foreign,
    rewind_target,
    starts_of,
)

log = structlog.get_logger()

#: Maximum wait of a step in s for a disk that hangs.
WRITES_S = 30.0
#: Time in s that rewinds of a tenant may take at once: two of the longest logs. Then they may take a share of all time,
#: because a rewind has no tokens and no other run is trained during its replay.
REWINDS_S = 60.0
REWINDS_SHARE = 0.1


@dataclass(frozen=True)
class StepRuns:
    """Runs of a step: all in memory, or stopped."""

    ops: tuple[QueuedOp, ...]  # ops to run
    stopped: Mapping[RunId, Failure]
    is_exact: bool
    rewinds: Mapping[OpId, NoteOutput | Failure] = field(default_factory=dict)
    """Outputs of the step's REWIND ops, which have run."""


class Restoring(Enum):
    """Outcome of loading a run into memory."""

    EXACT = auto()
    #: Its last bits may differ from this engine's numerics.
    INEXACT = auto()
    #: Its newest state was lost. A checkpoint replaces it, and the planned ops of the run are void.
    ROLLED_BACK = auto()


class RestoreStopped(Exception):
    """End of a restore because this process is stopping. Nothing has crashed."""


class RewindTime:
    """Time that the rewinds of each tenant have taken, less its share of the time since then."""

    def __init__(self) -> None:
        self._until: dict[TenantId, float] = {}
        """Time at which all of a tenant's rewinds are within its share."""

    def wait_s(self, tenant: TenantId, now: float) -> float:
        """Return the time in s until the tenant may rewind again; at most 0 if it may do so now."""
        return self._until.get(tenant, now) - now - REWINDS_S / REWINDS_SHARE

    def add(self, tenant: TenantId, seconds: float, now: float) -> None:
        """Count a rewind that took some time."""
        self._until = {name: until for name, until in self._until.items() if until > now}
        self._until[tenant] = self._until.get(tenant, now) + seconds / REWINDS_SHARE


class RunLifecycle:
    """Owner of the runs in the engine's memory, for the worker's loop."""

    def __init__(
        self,
        engine: WorkerEngine,
        execution: Execution,
        weights: WeightsStore,
        settings: WorkerSettings,
        policy: SnapshotPolicy,
        metrics: WorkerMetrics,
        cost: ReplayCost,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._weights = weights
        self._policy = policy
        self._snapshots = settings.blob_store.below("snapshots")
        self.copies = RecoveryCopies(engine, execution, weights, self._snapshots, policy, metrics, cost)
        self.progress = RestoreProgress()
        self._replay = Replay(engine, execution, weights, self._snapshots, self.progress)
        self._sweep = OrphanSweep(execution, settings)
        self.replayed_ops = 0
        self.uncounted: Counter[str] = Counter()
        """Counters for the pool's totals; cleared once a commit has written them."""
        self._rewind_time = RewindTime()
        self._rewound: dict[RunId, int] = {}
        """Runs that the current step has rewound, each with the seq of its state."""

    @property
    def resident(self) -> int:
        """Number of runs in memory."""
        return len(self.copies.backlogs)

    def restore(self, step: Step) -> Yielding[StepRuns | None]:
        """Load every run of a step into memory; those that cannot be restored fail alone.

        Return None if a run was rolled back to a checkpoint: then the step's planned ops of that run are void.
        """
        stopped: dict[RunId, Failure] = {}
        done: dict[RunId, int] = {}
        is_exact, is_rolled_back = True, False
        self._rewound = {}
        rewinds: dict[OpId, NoteOutput | Failure] = {}
        first = {op.run: op.seq for op in reversed(step.ops)}
        for run, seq in first.items():
            if self.done(run) != seq - 1:  # another worker may have changed it
                self.forget_state(run)
        yield from self._recreate_sources(step.ops)
        with self._progress_of(first):
            for run in dict.fromkeys(op.run for op in step.ops):
                match (yield from self._ensure_or_stop(run, step.tenant_by_run[run])):
                    case Failure() as failure:
                        stopped[run] = failure
                    case Restoring.ROLLED_BACK:
                        is_rolled_back = True
                    case outcome:
                        done[run], is_exact = self.done(run), is_exact and outcome is Restoring.EXACT
            if is_rolled_back:
                return None
            for op in step.ops:
                if op.kind is OpKind.REWIND and op.seq > done.get(op.run, op.seq):
                    rewinds[op.id] = yield from self._rewind(op)
        # A commit is atomic, so no op of a re-run step is committed. The check guards against running one twice.
        ops = tuple(op for op in step.ops if op.seq > done.get(op.run, -1))
        return StepRuns(ops, stopped, is_exact, rewinds)

    def _recreate_sources(self, ops: Iterable[QueuedOp]) -> Yielding[None]:
        """Recreate lost weights that loads among these ops need: forks of a run that was not stored."""
        loads = [op for op in ops if op.kind is OpKind.LOAD]
        if not loads:
            return
        self._weights.reload()
        lost = {record.ref: record for record in self._weights.lost()}
        for body in self._execution.bodies(loads) if lost else ():
            for source in LoadRequest.parse(body).sources if body else ():
                if source.ref in lost and self._weights.is_lost(source.ref):
                    yield from self.recreate_lost_weights(lost[source.ref])

    def recreate_lost_weights(self, weights: WeightsRecord) -> Yielding[None]:
        """Replay the run whose saved weights were lost before they were on disk."""
        with self._progress_of([weights.run]):
            yield from self._ensure_or_stop(weights.run, weights.tenant)
        if self._weights.is_lost(weights.ref):
            self._weights.give_up(weights.ref)

    @contextmanager
    def _progress_of(self, runs: Iterable[RunId]) -> Iterator[None]:
        """Count the progress of the runs among these that have a state to restore."""
        ops = {run: count for run in runs if (count := self._to_replay(run)) is not None}
        if not ops:
            yield
            return
        self.progress.begin(ops)
        try:
            yield
        finally:
            self.progress.end()

    def _to_replay(self, run: RunId) -> int | None:
        """Return the number of ops from a run's newest copy to its last commit; None if there is nothing to restore."""
        position = None if self.in_memory(run) else self._execution.logs.position(run)
        if position is None or (position.done == position.snap and not position.snapshot_file):
            return None
        return position.done - position.snap

    def _ensure_or_stop(self, run: RunId, tenant: TenantId) -> Yielding[Restoring | Failure]:
        """Load one run into memory. If it cannot be restored, roll it back, or stop it and fail all its requests."""
        if self.in_memory(run):
            return self._note_restored(run, None)
        try:
            yield from self._recreate_sources(self._logged(run))
            restored = yield from self.ensure(run)
        except ReplayDiverged as diverged:
            return self.stop(run, tenant, diverged)
        except SpoolCorrupt as lost:
            if not self._roll_back(run):
                return self.stop(run, tenant, lost)
            for record in self._weights.lost():
                if record.run == run:  # the log that would have recreated them was removed
                    self._weights.give_up(record.ref)
            return Restoring.ROLLED_BACK
        finally:
            self.progress.finish(run)
        if restored is not None:
            yield  # a copy of the restored run may be due
        return self._note_restored(run, restored)

    def ensure(self, run: RunId) -> Yielding[Restored | None]:
        """Load a run into the engine, restored if necessary. Return None if it was in memory.

        Yields after each micro-batch of the replay. A copy of a replayed run is due afterwards.

        Raises:
            ReplayDiverged, SpoolCorrupt: the run cannot continue.
        """
        if self.in_memory(run):
            return None
        self.copies.await_copy(run)
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
        self.copies.backlogs[run] = backlog
        return restored

    def _logged(self, run: RunId) -> list[QueuedOp]:
        """Return the ops that a restore of this run may execute. Raises SpoolCorrupt if one of them is missing."""
        position = self._execution.logs.position(run)
        if position is None:
            return []
        first = 1 + min((start.seq for start in starts_of(position)), default=-1)
        return self._execution.logs.logged_ops(run, first, position.done)

    def _note_restored(self, run: RunId, restored: Restored | None) -> Restoring:
        """Count the ops that restored a run; `restored` is None if it was in memory before."""
        failpoint("worker.replayed", run)
        replayed = restored.replayed if restored else 0
        self.replayed_ops += replayed
        self.uncounted["replayed_ops"] += replayed
        return Restoring.EXACT if restored is None or restored.is_exact else Restoring.INEXACT

    def _roll_back(self, run: RunId) -> bool:
        """Replace the lost newest state of a run by its newest readable checkpoint. Return False if it has none.

        Afterwards the run is not in memory: `ensure` restores it. A rollback is never silent. The run's
        `weights_epoch` grows, and requests for the lost state fail with that reason. Later requests run. Idempotent:
        a repeated call finds a readable snapshot.

        Raises:
            OSError: the snapshot cannot be written now.
            Fenced: another process took over this worker id.
        """
        self.forget_state(run)
        # A copy of the lost state, not registered because the log holds an unstored save.
        self.copies.writing.pop(run, None)
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

    def _rewind(self, op: QueuedOp) -> Yielding[NoteOutput | Failure]:
        """Run a REWIND, whose run is in memory; a refusal changes nothing."""
        (body,) = self._execution.bodies([op])
        position = self._execution.logs.position(op.run)
        if body is None or position is None:
            return Failure("The request is no longer stored.", "server")
        step = json.loads(body)["step"]
        target = rewind_target(position, step)
        if isinstance(target, str):
            return Failure(target[0].upper() + target[1:] + ".", "user")
        began = time.monotonic()
        if (wait_s := self._rewind_time.wait_s(position.tenant, began)) > 0:
            return Failure(
                f"Rewinds of one tenant may take {REWINDS_SHARE:.0%} of a worker's time. "
                f"Retry in {math.ceil(wait_s)} s, or load a checkpoint.",
                "user",
            )
        try:
            yield from self._rewind_to(op.run, target)
            failpoint("worker.rewound", op.request_id)
        except (ReplayDiverged, SpoolCorrupt) as broken:
            log.error("rewind_failed", run=op.run, step=step, reason=str(broken))
            yield from self.ensure(op.run)
            return Failure(f"Step {step} cannot be computed again on the server.", "server")
        finally:
            now = time.monotonic()
            self._rewind_time.add(position.tenant, now - began, now)
        self._rewound[op.run] = target
        return NoteOutput({"step": step, "seq": target})

    def _rewind_to(self, run: RunId, last: int) -> Yielding[None]:
        """Replace a run in memory by its state as of an earlier op, before the commit of its REWIND.

        Yields like `ensure`. Raises ReplayDiverged or SpoolCorrupt; the run is not in memory then.
        """
        self.copies.await_copy(run)
        done = self.copies.backlogs.pop(run).seq  # without a backlog, no copy of it is taken now
        position = self._execution.logs.position(run)
        if position is None:
            raise SpoolCorrupt(f"Run {run} has no log.")
        yield from self._replay.restore_at(run, position, last)
        self.copies.backlogs[run] = ReplayBacklog(done, used_at=time.monotonic(), is_rewound=True)

    def reload_state(self, run: RunId) -> bool:
        """Restore the state of a run before its step, after any rewind; return False if its bits may differ.

        Raises ReplayDiverged, SpoolCorrupt.
        """
        self.forget_state(run)
        outcome = self._note_restored(run, run_to_end(self.ensure(run)))
        if run in self._rewound:
            run_to_end(self._rewind_to(run, self._rewound[run]))
        return outcome is Restoring.EXACT

    def stop(self, run: RunId, tenant: TenantId, broken: ReplayDiverged | SpoolCorrupt) -> Failure:
        """Stop a run that cannot continue."""
        log.error("run_failed", run=run, tenant=tenant, reason=str(broken))
        self.uncounted["diverged_runs"] += isinstance(broken, ReplayDiverged)
        self._execution.fail_run(run, tenant)
        self.forget_state(run)
        return Failure(RUN_STOPPED.json()["error"], "server")

    def await_writes(self) -> None:
        """Wait until no save and no copy is in progress, at most WRITES_S."""
        until = time.monotonic() + WRITES_S
        self._weights.await_writes(until)
        self.copies.await_writes(until)

    def in_memory(self, run: RunId) -> bool:
        """Return True if the engine has the state of a run."""
        return run in self.copies.backlogs

    def done(self, run: RunId) -> int:
        """Return the last seq whose effect is in memory; -1 for a run that is not in memory."""
        backlog = self.copies.backlogs.get(run)
        return backlog.seq if backlog else -1

    def forget_state(self, run: RunId) -> None:
        """Drop a run from memory, so that `ensure` restores it from its log."""
        self._engine.adapters.drop(run)
        self.copies.forget(run)

    def maintain(self) -> None:
        """Run periodic maintenance: register snapshots, start new ones, evict runs, sweep."""
        now = time.monotonic()
        self.copies.copy_due()
        for run, backlog in list(self.copies.backlogs.items()):
            if self._policy.may_evict(backlog, now):
                self._release(run, "run_evicted")
        for name in self._engine.adapters.runs_to_evict():
            # A pass that loses its run here would start anew in every cycle.
            if name not in self._engine.open_passes.runs:
                self._release(RunId(name), "run_evicted", reason="host_bytes")
        for run in self._execution.runs_to_drop():
            if run not in self.copies.writing and self._execution.forget(run):
                self.forget_state(run)
                remove_snapshots(self._snapshots, run)
                log.info("run_dropped", run=run)
        self._sweep.maintain(now, self.copies.writing)

    def hand_over(self) -> None:
        """Release all runs, because another worker continues them."""
        for run in list(self.copies.backlogs):
            self._release(run, "run_handed_over")

    def _release(self, run: RunId, event: str, **about: str) -> None:
        """Drop a run from memory and log the event, as soon as a copy contains all of it. Otherwise start that copy."""
        backlog = self.copies.backlogs.get(run)
        if backlog is None or run in self.copies.writing:
            return
        if backlog.ops:
            self.copies.start(run, backlog)
        else:
            self.forget_state(run)
            log.info(event, run=run, **about)
