"""Flight recorder: the last cycles of a worker, each complete in a file, and their replay elsewhere.

The inputs of a cycle are written before it runs, so a cycle that kills its process is recorded, too.
A full disk affects recordings only. See docs/operate/recorder.md.

A replay runs one recorded cycle again and compares the outcomes. It needs the base model and the file, but no server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import structlog
import torch

from cotrain_store.messages.ids import OpId, RunId
from cotrain_store.messages.ops import QueuedOp, Step
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.facts import Numerics
from cotrain_workers.engine.lora.quantized import Quantization
from cotrain_workers.engine.ops import Failure, HostOptimizer, HostWeights, NoteOutput, Op, Output, WeightsMissing
from cotrain_workers.fingerprints import Fingerprint, differences, fingerprint_of, fingerprint_of_state
from cotrain_workers.group.engine import WorkerEngine
from cotrain_workers.op_codec import Checkpoints, engine_op
from cotrain_workers.recorder.file import (
    CycleFacts,
    Findings,
    ReadCheckpoints,
    RecordedCycle,
    add_findings,
    checkpoints_of,
    write_inputs,
)

log = structlog.get_logger()

SUFFIX = ".zip"
#: Tolerance between numbers that were computed with different numerics; the same as in a recovery (ADR 5).
OTHER_NUMERICS = 1e-2
Verdict = Literal["equal", "close", "DIVERGED", "left out", "new"]


@dataclass
class Recorder:
    """Recorder of one worker's cycles."""

    engine: WorkerEngine
    checkpoints: Checkpoints
    folder: Path
    pool: str
    base_model: str
    epoch: int
    kept: int  # last cycles in `folder`; 0 records nothing
    _recording: Path | None = None

    def __post_init__(self) -> None:
        if self.kept:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, step: Step, bodies: Mapping[OpId, bytes]) -> None:
        """Write the inputs of a step just before it runs. Idempotent."""
        self._recording = None
        if not self.kept:
            return
        # With the epoch, a re-run does not overwrite the recording of the cycle that killed a predecessor.
        path = self.folder / f"{step.cycle:012}-{self.epoch}{SUFFIX}"
        in_order = [bodies[op.id] for op in step.ops]
        try:
            read = self._read_by(step.ops, in_order)
            write_inputs(path, self._facts(step), in_order, states_of(self.engine, step), read)
            self._forget_old()
        except OSError as full:
            log.warning("cycle_not_recorded", cycle=step.cycle, reason=str(full))
        else:
            self._recording = path

    def finish(self, step: Step, outputs: Mapping[OpId, Output]) -> None:
        """Add the outcome of the step that began last. Call it before the engine runs anything newer."""
        if self._recording is None:
            return
        try:
            add_findings(self._recording, findings_of(self.engine, step, outputs))
        except OSError as full:
            log.warning("cycle_not_recorded", cycle=step.cycle, reason=str(full))
        self._recording = None

    def _facts(self, step: Step) -> CycleFacts:
        return CycleFacts(
            recorded_at=time.time(),
            pool=self.pool,
            base_model=self.base_model,
            model=self.engine.facts.model,
            numerics=self.engine.facts.numerics,
            step=step,
        )

    def _read_by(self, ops: Sequence[QueuedOp], bodies: Sequence[bytes]) -> ReadCheckpoints:
        """Return the checkpoints that ops will read. Missing ones are left out; they are missing for the ops, too."""
        weights: dict[str, HostWeights] = {}
        optimizers: dict[str, HostOptimizer | None] = {}
        for op, body in zip(ops, bodies, strict=True):
            for ref, with_optimizer in checkpoints_of(op, body):
                try:
                    weights[ref] = self.checkpoints.host(ref)
                    if with_optimizer:
                        optimizers[ref] = self.checkpoints.optimizer(ref)
                except WeightsMissing:
                    continue
        return ReadCheckpoints(weights, optimizers)

    def _forget_old(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}"))[: -self.kept]:
            path.unlink(missing_ok=True)


def states_of(engine: WorkerEngine, step: Step) -> Iterator[tuple[RunId, AdapterState]]:
    """Yield the state of each run of a step in the engine, one at a time, because each may be large."""
    for run in dict.fromkeys(op.run for op in step.ops):
        if run in engine.adapters:
            yield run, engine.adapters.state(run)


def findings_of(engine: WorkerEngine, step: Step, outputs: Mapping[OpId, Output]) -> Findings:
    """Return the outcome of a step that has just run."""
    finished = [op.id for op in step.ops if op.id in outputs]
    states = states_of(engine, step)
    return {
        **{op_id: fingerprint_of(outputs[op_id]) for op_id in finished},
        **{(run, None): fingerprint_of_state(state) for run, state in states},
    }


@dataclass(frozen=True)
class Compared:
    """Comparison of one op. If `seq` is None, of one run's state after the cycle."""

    run: str
    seq: int | None
    what: str
    digest: str  # digest of the new outcome, as in a cycle's record
    verdict: Verdict
    details: str  # differences, the reason for leaving it out, or the outcome if the cycle had none


def engine_for(facts: CycleFacts, base_model: str | None, device: str | None) -> Engine:
    """Return an engine with the base model, loaded as by the recording worker if this machine can.

    Raises OSError if there is no such model, and UnsupportedModel if it cannot be trained.
    """
    numerics = facts.numerics
    can_cuda = torch.cuda.is_available()
    if numerics.threads:
        torch.set_num_threads(numerics.threads)
    return Engine.load(
        base_model or facts.model,
        device=device or (numerics.device if can_cuda else "cpu"),
        dtype=getattr(torch, numerics.dtype),
        micro_batch_tokens=numerics.micro_batch_tokens,
        head_chunk_rows=numerics.head_chunk_rows,
        lora_backend=numerics.lora,
        fusion=bool(numerics.fused),
        local_files_only=False,
        quantization=cast(Quantization, numerics.quantization),
    )


def restore_before(engine: Engine, cycle: RecordedCycle) -> None:
    """Load the runs of a cycle into an engine without them, in their states before the cycle.

    Raises ValueError if they belong to another base model.
    """
    for run, state in cycle.before.items():
        engine.adapters.restore(run, state)


def run_again(engine: Engine, cycle: RecordedCycle, *, everything: bool = False) -> Findings:
    """Run a recorded cycle after `restore_before`, and return the outcome.

    Ops that failed by accident (a crash, a full disk) are left out unless `everything` is set, and so are ops that
    did not finish in the cycle. A pass that took several cycles runs whole in its last one, from the state before
    the first one. In the other cycles it changed nothing. Exceptions of the engine are not caught.
    """
    outputs: dict[OpId, Output] = {}
    runnable: list[Op] = []
    for op, body in zip(cycle.facts.step.ops, cycle.bodies, strict=True):
        if cycle.found is not None:
            then = cycle.found.get(op.id)
            if then is None or (then.is_accident and not everything):
                continue
        request = engine_op(op, body, cycle.read, engine.adapters.layout_of)
        if isinstance(request, Failure | NoteOutput):
            outputs[op.id] = request
        else:
            runnable.append(request)
    outputs |= engine.run(runnable).outputs
    return findings_of(engine, cycle.facts.step, outputs)


def tolerance_of(then: Numerics, now: Numerics) -> float:
    """Return the tolerance between numbers: 0 on a CPU with the recorded numerics.

    On CUDA the same plan gives the same bits. However, the plan does not record the way a cycle was run: in
    halved micro-batches after memory ran out, or op by op after a crash.
    """
    return 0.0 if then == now and now.device == "cpu" else OTHER_NUMERICS


def compared(cycle: RecordedCycle, again: Findings, tolerance: float) -> Iterator[Compared]:
    """Compare the recorded and the new outcome of a cycle: every op, then every run's state.

    If `tolerance` is 0, bits are compared. A cycle without a recorded outcome has nothing to compare with.
    """
    then = cycle.found or {}
    kind_by_op = {op.id: op.kind.value for op in cycle.facts.step.ops}
    states = [at for at in dict.fromkeys([*then, *again]) if at[1] is None]
    for run, seq in (*kind_by_op, *states):
        pair = then.get((run, seq)), again.get((run, seq))
        yield _compared(run, seq, "state after" if seq is None else kind_by_op[run, seq], pair, tolerance)


def _compared(
    run: str, seq: int | None, what: str, pair: tuple[Fingerprint | None, Fingerprint | None], tolerance: float
) -> Compared:
    then, now = pair
    if now is None:
        if then is None:
            return Compared(run, seq, what, "", "left out", "not over in this cycle")
        verdict: Verdict = "left out" if then.is_accident else "DIVERGED"
        return Compared(run, seq, what, "", verdict, then.text)
    if then is None or then.is_accident:
        return Compared(run, seq, what, now.digest, "new", now.text)
    found = differences(then, now, tolerance)
    if found:
        return Compared(run, seq, what, now.digest, "DIVERGED", "; ".join(found))
    is_equal = not differences(then, now, tolerance=0.0)
    return Compared(run, seq, what, now.digest, "equal" if is_equal else "close", "")
