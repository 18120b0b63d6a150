"""Restoration of the runs of a step, and failure of those that cannot be restored, one by one."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from cotrain_store.bodies.adapter_bodies import LoadRequest
from cotrain_store.disk.storage import RUN_STOPPED
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import WeightsRecord
from cotrain_store.oplog.execution import Execution
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.ops import Failure, NoteOutput
from cotrain_workers.recovery.replay import ReplayDiverged, Restored, rewind_target
from cotrain_workers.recovery.resident_runs import ResidentRuns

log = structlog.get_logger()

#: Maximum wait of a step in s for a disk that hangs.
WRITES_S = 30.0
#: Time in s that rewinds of a tenant may take at once: two of the longest logs. Then they may take a share of all time,
#: because a rewind has no tokens and no other run is trained during its replay.
REWINDS_S = 60.0
REWINDS_SHARE = 0.1


@dataclass(frozen=True)
class RolledBack:
    """Outcome of a rollback: the run continues from a checkpoint, and requests for the lost state fail."""


@dataclass(frozen=True)
class StepRuns:
    """Runs of a step: all in memory, or stopped."""

    ops: tuple[QueuedOp, ...]  # ops to run
    stopped: Mapping[RunId, Failure]
    is_exact: bool
    rewinds: Mapping[tuple[str, int], NoteOutput | Failure] = field(default_factory=dict)
    """Outputs of the step's REWIND ops, which have run."""


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
    """Lifecycle of the runs of one worker, for its loop."""

    def __init__(self, execution: Execution, residents: ResidentRuns, weights: WeightsStore) -> None:
        self._execution = execution
        self._residents = residents
        self._weights = weights
        self.replayed_ops = 0
        self.progress = residents.progress
        self.uncounted: Counter[str] = Counter()
        """Counters for the pool's totals; cleared once a commit has written them."""
        self._rewind_time = RewindTime()
        self._rewound: dict[RunId, int] = {}
        """Runs that the current step has rewound, each with the seq of its state."""

    def restore(self, step: Step) -> Yielding[StepRuns | RolledBack]:
        """Load every run of a step into memory; those that cannot be restored fail alone."""
        stopped: dict[RunId, Failure] = {}
        done: dict[RunId, int] = {}
        is_exact = True
        self._rewound = {}
        rewinds: dict[tuple[str, int], NoteOutput | Failure] = {}
        rolled_back: RolledBack | None = None
        first = {op.run: op.seq for op in reversed(step.ops)}
        for run, seq in first.items():
            self._forget_unless(run, seq - 1)
        yield from self._recreate_sources(step.ops)
        with self._counted(first):
            for run in dict.fromkeys(op.run for op in step.ops):
                match (yield from self._ensure(run, step.tenant_by_run[run])):
                    case Failure() as failure:
                        stopped[run] = failure
                    case RolledBack() as rolled_back:
                        pass
                    case exactly:
                        done[run], is_exact = self._residents.done(run), is_exact and exactly
            for op in step.ops if rolled_back is None else ():
                if op.kind is OpKind.REWIND and op.seq > done.get(op.run, op.seq):
                    rewinds[op.run, op.seq] = yield from self._rewind(op)
        # A commit is atomic, so no op of a re-run step is committed. The check guards against running one twice.
        ops = tuple(op for op in step.ops if op.seq > done.get(op.run, -1))
        return rolled_back or StepRuns(ops, stopped, is_exact, rewinds)

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
                f"Rewinds of one tenant may take {REWINDS_SHARE:.0%} of a worker's time. Retry in {math.ceil(wait_s)} s, or "
                "load a checkpoint.",
                "user",
            )
        try:
            yield from self._residents.rewind(op.run, target)
            failpoint("worker.rewound", op.request_id)
        except (ReplayDiverged, SpoolCorrupt) as broken:
            log.error("rewind_failed", run=op.run, step=step, reason=str(broken))
            yield from self._residents.ensure(op.run)
            return Failure(f"Step {step} cannot be computed again on the server.", "server")
        finally:
            now = time.monotonic()
            self._rewind_time.add(position.tenant, now - began, now)
        self._rewound[op.run] = target
        return NoteOutput({"step": step, "seq": target})

    def recreate_lost_weights(self, weights: WeightsRecord) -> Yielding[None]:
        """Replay the run whose saved weights were lost before they were on disk."""
        with self._counted([weights.run]):
            yield from self._ensure(weights.run, weights.tenant)
        if self._weights.is_lost(weights.ref):
            self._weights.give_up(weights.ref)

    def reload_state(self, run: RunId) -> bool:
        """Restore the state of a run before its step, after any rewind; return False if its bits may differ.

        Raises ReplayDiverged, SpoolCorrupt.
        """
        self._residents.forget_state(run)
        is_exact = self._note_restored(run, run_to_end(self._residents.ensure(run)))
        if run in self._rewound:
            run_to_end(self._residents.rewind(run, self._rewound[run]))
        return is_exact

    def await_writes(self) -> None:
        """Wait until no save and no copy is in progress, at most WRITES_S."""
        until = time.monotonic() + WRITES_S
        self._weights.await_writes(until)
        self._residents.await_writes(until)

    def stop(self, run: RunId, tenant: TenantId, broken: ReplayDiverged | SpoolCorrupt) -> Failure:
        """Stop a run that cannot continue."""
        log.error("run_failed", run=run, tenant=tenant, reason=str(broken))
        self.uncounted["diverged_runs"] += isinstance(broken, ReplayDiverged)
        self._execution.fail_run(run, tenant)
        self._residents.forget_state(run)
        return Failure(RUN_STOPPED.json()["error"], "server")

    def _forget_unless(self, run: RunId, done: int) -> None:
        """Drop a run from memory unless its state is that after seq `done`: another worker may have changed it."""
        if self._residents.done(run) != done:
            self._residents.forget_state(run)

    @contextmanager
    def _counted(self, runs: Iterable[RunId]) -> Iterator[None]:
        """Count the progress of the runs among these that have a state to restore."""
        ops = {run: self._residents.to_replay(run) for run in runs}
        self.progress.begin({run: count for run, count in ops.items() if count is not None})
        try:
            yield
        finally:
            self.progress.end()

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

    def _ensure(self, run: RunId, tenant: TenantId) -> Yielding[bool | RolledBack | Failure]:
        """Load one run into memory; return False if its bits may differ.

        If it cannot be restored, roll it back, or stop it and return the failure of all its requests.
        """
        try:
            yield from self._recreate_sources(self._residents.logged(run))
            restored = yield from self._residents.ensure(run)
        except ReplayDiverged as diverged:
            return self.stop(run, tenant, diverged)
        except SpoolCorrupt as lost:
            if not self._residents.roll_back(run):
                return self.stop(run, tenant, lost)
            for record in self._weights.lost():
                if record.run == run:  # the log that would have recreated them was removed
                    self._weights.give_up(record.ref)
            return RolledBack()
        finally:
            self.progress.finish(run)
        if restored is not None:
            yield  # a copy of the restored run may be due
        return self._note_restored(run, restored)

    def _note_restored(self, run: RunId, restored: Restored | None) -> bool:
        """Count the replayed ops; return True if the state has this engine's bits."""
        failpoint("worker.replayed", run)
        replayed = restored.replayed if restored else 0
        self.replayed_ops += replayed
        self.uncounted["replayed_ops"] += replayed
        return restored is None or restored.is_exact
