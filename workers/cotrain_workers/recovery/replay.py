"""Restoration of a run: its snapshot, then its log from the snapshot to `done`.

The state of a run is the fold of its ops. The engine produces the same bits for the same ops next to any other
runs, so a replayed run ends in the same state. The replayed results are compared with the stored ones as a proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from cotrain.wire.proto import wire_pb2
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.bodies.adapter_bodies import SaveRequest
from cotrain_store.errors import SpoolCorrupt, StoreError
from cotrain_store.messages.ids import RunId, WeightsRef
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind
from cotrain_store.messages.runs import RunState
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.reader import LogPosition
from cotrain_workers.checkpoints.state_files import SnapshotUnreadable, read_snapshot
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.ops import Failure, NoteOutput, Op, Output, SaveOutput
from cotrain_workers.engine.training.drift import LAG_METRICS
from cotrain_workers.group.engine import WorkerEngine
from cotrain_workers.op_codec import engine_op
from cotrain_workers.results import CYCLE_METRIC, result_of, saved_of

log = structlog.get_logger()

#: Ops that change no state leave no body in the log and are not run again.
_STATELESS = (OpKind.FORWARD, OpKind.METRICS, OpKind.REJECTED)
#: These run last in a cycle, in order.
_TAIL = (OpKind.SAVE, OpKind.LOAD)
#: A cycle contains no further ops of the run after one of these.
_LAST = (OpKind.OPTIM_STEP, *_TAIL)


class ReplayDiverged(StoreError):
    """Error: the replay of a run did not reproduce the results that its clients already have."""


@dataclass(frozen=True)
class Restored:
    """Outcome of restoring a run."""

    position: LogPosition
    replayed: int  # number of replayed ops
    from_newest: bool  # False if its newest snapshot could not be used
    is_exact: bool
    """False if memory ran out, so that the last bits of the state may differ from this engine's numerics."""


class RestoreProgress:
    """Runs being restored, and the ops of their logs: counted by the worker's loop, read by its heartbeat."""

    def __init__(self) -> None:
        self._ops: dict[RunId, int] = {}
        self._done: dict[RunId, int] = {}
        self._runs_done = 0

    def begin(self, ops_by_run: Mapping[RunId, int]) -> None:
        """Start the progress of these runs, each with the number of ops after its newest copy."""
        self._ops, self._done, self._runs_done = dict(ops_by_run), {}, 0

    def expect(self, run: RunId, ops: int) -> None:
        """Correct the number of ops of one run: more ops follow an older copy."""
        if run in self._ops:
            self._ops = self._ops | {run: ops}

    def reach(self, run: RunId, ops: int) -> None:
        """Record the number of finished ops of a run."""
        if run in self._ops:
            self._done = self._done | {run: min(ops, self._ops[run])}

    def finish(self, run: RunId) -> None:
        """Count a run as finished, whether it was restored or not."""
        if run in self._ops:
            self.reach(run, self._ops[run])
            self._runs_done += 1

    def end(self) -> None:
        """Clear the progress after the restore."""
        self.begin({})

    @property
    def now(self) -> dict[str, int] | None:
        """Return the value of `WorkerHeartbeat.restoring`: None while nothing is restored."""
        ops, done, runs_done = self._ops, self._done, self._runs_done
        if not ops:
            return None
        return {"runs_done": runs_done, "runs": len(ops), "ops_done": sum(done.values()), "ops": sum(ops.values())}


@dataclass(frozen=True)
class Replay:
    """Restoration of runs into one engine, from their logs and recovery copies."""

    engine: WorkerEngine
    execution: Execution
    weights: WeightsStore
    snapshots: Blobs  # recovery copies
    progress: RestoreProgress

    def restore(self, run: RunId) -> Yielding[Restored]:
        """Load a run into the engine as of its committed `done`; yields like the engine's cycles.

        Saves whose weights were lost before they were on disk are recreated for the weights store.

        Raises:
            ReplayDiverged: the run must not continue; its log has the reason.
            SpoolCorrupt: a part of its log, or the state from which it starts, is missing.
        """
        position = self.execution.logs.position(run)
        if position is None or position.state is RunState.FAILED:
            raise SpoolCorrupt(f"Run {run} has no log to restore from.")
        return (yield from self.restore_at(run, position, position.done))

    def restore_at(self, run: RunId, position: LogPosition, last: int) -> Yielding[Restored]:
        """Load a run into the engine as of an op that its log reaches; see `restore`."""
        lost = SpoolCorrupt(f"Run {run} has no copy that can be read.")
        for start in starts_of(position):
            if start.seq > last:
                continue
            self.progress.expect(run, last - start.seq)
            try:
                replayed, is_exact = yield from self._run_log(run, start, position, last)
            except (SnapshotUnreadable, SpoolCorrupt) as unusable:
                log.error("snapshot_unusable", run=run, seq=start.seq, reason=str(unusable))
                lost = SpoolCorrupt(str(unusable))
                continue
            if replayed or start.file:
                log.info("run_restored", run=run, snapshot=start.seq, replayed=replayed, done=last)
            return Restored(position, replayed, start.seq == position.snap, is_exact)
        self.engine.adapters.drop(run)
        raise lost

    def _load(self, run: RunId, start: ReplayStart) -> None:
        """Load the state of a start into the engine; raises SnapshotUnreadable."""
        if not start.file:
            return  # its first op creates the run
        state = read_snapshot(self.snapshots, start.file, start.sha256, run, start.seq)
        try:
            self.engine.adapters.restore(run, state)
        except ValueError as foreign:
            raise SnapshotUnreadable(f"Snapshot {start.file}: {foreign}") from foreign

    def _run_log(self, run: RunId, start: ReplayStart, position: LogPosition, last: int) -> Yielding[tuple[int, bool]]:
        """Run the log from a start to `last`; return the number of ops, and False if memory ran out.

        Bits are compared from the start until memory first runs out. If lost saves are among the ops that a rewind
        abandoned, those ops run first, from the start.
        """
        logged = [
            op
            for op in self.execution.logs.logged_ops(run, start.seq + 1, last)
            if op.kind not in _STATELESS
            and (op.kind is not OpKind.SAVE or self.weights.is_lost(WeightsRef(op.request_id)))
        ]
        ran, is_exact = 0, True
        for ops in timelines(logged, start.seq, position.rewinds):
            self.engine.adapters.drop(run)
            self._load(run, start)
            ops = _from_last_load(ops)
            is_exact = yield from self._run_ops(run, start, ops)
            ran += len(ops)
        return ran, is_exact

    def _run_ops(self, run: RunId, start: ReplayStart, ops: Sequence[QueuedOp]) -> Yielding[bool]:
        """Run ops from a loaded start; return False if memory ran out."""
        is_exact = True
        # On a CPU a run's results do not depend on its neighbours. A log of other numerics (another CPU, another torch)
        # has no exact replay.
        on_cpu = self.engine.facts.numerics.device == "cpu"
        compares_bits = on_cpu and not is_foreign(self.engine, start.numerics_id)
        for group in _cycles(ops):
            bodies = _bodies(self.execution, group)
            cycle = yield from self.engine.cycle(self._requests(group, bodies))
            is_exact = is_exact and cycle.is_exact
            for op, body in zip(group, bodies, strict=True):
                if (output := cycle.outputs.get(op.id)) is not None:
                    self._accept(op, body, output, exact=compares_bits and is_exact)
            self.progress.reach(run, group[-1].seq - start.seq)
        return is_exact

    def _requests(self, group: Sequence[QueuedOp], bodies: Sequence[bytes]) -> list[Op]:
        """Decode the ops to replay. A client's invalid request failed, and fails again without a run."""
        runnable: list[Op] = []
        for op, body in zip(group, bodies, strict=True):
            request = engine_op(op, body, self.weights, self.weights.layout_of)
            if isinstance(request, Failure):
                if request.category == "server":  # it ran before, so the request is not the cause
                    raise SpoolCorrupt(f"{op.request_id} cannot run again: {request.message}")
            elif not isinstance(request, NoteOutput):
                runnable.append(request)
        return runnable

    def _accept(self, op: QueuedOp, body: bytes, output: Output, *, exact: bool) -> None:
        """Put a save again. Compare another replayed result with the stored one, which may have expired.

        Raises ReplayDiverged. The saves of a group come after its passes and its step.
        """
        if isinstance(output, SaveOutput):
            self.weights.put_again(WeightsRef(op.request_id), saved_of(SaveRequest.parse(body), output))
            return
        stored = self.execution.logs.stored_result(op)
        if stored is not None and not same_result(stored, result_of(op, output, cycle=0), exact=exact):
            raise ReplayDiverged(f"Run {op.run}: replaying seq {op.seq} gave another result.")


def same_result(stored: Result, replayed: Result, *, exact: bool) -> bool:
    """Compare two results except for their cycles and policy lags. On CUDA, other neighbours move the last bits.

    A lag counts committed steps of the run, and a replay has none.
    """
    if stored.kind != replayed.kind:
        return False
    tolerance = 0.0 if exact else 1e-2
    if stored.kind is not ResultKind.PASS:
        before, after = (each.json().get("metrics", {}) for each in (stored, replayed))
        return _same_metrics(before, after, tolerance)
    then, now = (wire_pb2.ForwardBackwardOutput.FromString(each.payload) for each in (stored, replayed))
    old, new = _logprobs(then), _logprobs(now)
    return (
        _same_metrics(then.metrics, now.metrics, tolerance)
        and old.shape == new.shape
        and np.allclose(old, new, rtol=tolerance, atol=tolerance, equal_nan=True)
    )


def _logprobs(output: wire_pb2.ForwardBackwardOutput) -> np.ndarray:
    records = [record.fields["logprobs"].data for record in output.loss_fn_outputs]
    return np.frombuffer(b"".join(records), "<f4")


def _same_metrics(before: Mapping[str, float], after: Mapping[str, float], tolerance: float) -> bool:
    names = {*before, *after} - {CYCLE_METRIC, *LAG_METRICS}
    return all(
        name in before
        and name in after
        and math.isclose(before[name], after[name], rel_tol=tolerance, abs_tol=tolerance)
        for name in names
    )


@dataclass(frozen=True)
class ReplayStart:
    """Start of a replay: the state after `seq`, in a file, or nothing at all (-1, no file)."""

    seq: int
    file: str
    sha256: str
    numerics_id: str  # numerics of the workers that wrote the log from here on


def starts_of(position: LogPosition) -> list[ReplayStart]:
    """Return the states from which a replay of a run may start, the newest first: two snapshots, or its beginning.

    An older start only costs a longer replay, because the log reaches back to it. Pure.
    """
    newest = ReplayStart(position.snap, position.snapshot_file, position.snapshot_sha256, position.numerics_id)
    older = ReplayStart(position.older_snap, position.older_file, position.older_sha256, position.older_numerics_id)
    return [start for start in dict.fromkeys((newest, older)) if start.file or start.seq == -1]


def is_foreign(engine: WorkerEngine, numerics_id: str) -> bool:
    """Return True if this engine may produce other bits than the writers of a log."""
    return numerics_id not in ("", engine.facts.numerics_id)


def timelines(ops: Sequence[QueuedOp], start: int, rewinds: Mapping[int, int]) -> list[list[QueuedOp]]:
    """Return the ops to run from a start: first up to each save that a rewind abandoned, at last the remaining ones.

    `ops` hold only saves that must be created again. `rewinds` maps the seq of each successful rewind to the
    seq to which it returned. Pure.

    Raises:
        SpoolCorrupt: a rewind returned to a state before the start.
    """
    last = _after_rewinds(ops, start, rewinds)
    abandoned = [op for op in ops if op.kind is OpKind.SAVE and op not in last]
    found = [last]
    while abandoned:
        until = abandoned[-1].seq
        found.insert(0, _after_rewinds([op for op in ops if op.seq <= until], start, rewinds))
        abandoned = [op for op in abandoned if op not in found[0]]
    return found


def _after_rewinds(ops: Iterable[QueuedOp], start: int, rewinds: Mapping[int, int]) -> list[QueuedOp]:
    kept: list[QueuedOp] = []
    for op in ops:
        if op.kind is not OpKind.REWIND:
            kept.append(op)
        elif op.seq in rewinds:  # a refused one has no effect
            target = rewinds[op.seq]
            if target < start:
                raise SpoolCorrupt(f"{op.request_id} returned to a state before this copy.")
            kept = [each for each in kept if each.seq <= target]
    return kept


def rewind_target(position: LogPosition, step: int) -> int | str:
    """Return the seq after which a run has taken `step` optimizer steps, or the reason of a refusal. Pure."""
    seq_by_step = {number: seq for seq, number in position.steps.items() if seq <= position.done}
    if position.reaches_start:
        seq_by_step[0] = 0
    if step in seq_by_step:
        return seq_by_step[step]
    if not seq_by_step:
        return f"step {step} is out of reach: the log of this run holds no optimizer step"
    return (
        f"step {step} is out of reach: this run can go back to steps {min(seq_by_step)} to "
        f"{max(seq_by_step)}, which its log holds since its second newest recovery copy. Load a checkpoint for others"
    )


def _from_last_load(ops: list[QueuedOp]) -> list[QueuedOp]:
    """Return the ops without those that a load replaced. The op that created the run and unstored saves stay.

    A failed load does not count: its commit left only its place in the log.
    """
    kinds = [op.kind for op in ops]
    unstored = kinds.index(OpKind.SAVE) if OpKind.SAVE in kinds else len(ops)
    start = max((at for at in range(unstored) if kinds[at] is OpKind.LOAD), default=0)
    return [op for op in ops[:start] if op.seq == 0] + ops[start:]


def _cycles(ops: Sequence[QueuedOp]) -> Iterator[list[QueuedOp]]:
    """Split a log into groups that fit into one engine cycle: passes, an optimizer step, saves and loads."""
    group: list[QueuedOp] = []
    for op in ops:
        if group and group[-1].kind in _LAST and op.kind not in _TAIL:
            yield group
            group = []
        group.append(op)
    if group:
        yield group


def _bodies(execution: Execution, group: Sequence[QueuedOp]) -> list[bytes]:
    bodies = []
    for op, body in zip(group, execution.bodies(group), strict=True):
        if body is None:
            raise SpoolCorrupt(f"The body of {op.request_id} is gone.")
        bodies.append(body)
    return bodies
