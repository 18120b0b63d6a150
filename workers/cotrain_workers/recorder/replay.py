"""Run one recorded cycle again, and compare. Needs a base model and the file, and no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from cotrain_store.messages.ids import RunId, WeightsRef
from cotrain_store.messages.ops import QueuedOp
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.numerics import Numerics
from cotrain_workers.engine.ops import (
    Failure,
    HostOptimizer,
    HostWeights,
    Op,
    Output,
    WeightsMissing,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout
from cotrain_workers.fingerprints import (
    Fingerprint,
    differences,
    fingerprint_of,
    fingerprint_of_state,
)
from cotrain_workers.op_codec import engine_op
from cotrain_workers.recorder.file import CycleFacts, Findings, RecordedCycle

Verdict = Literal["equal", "close", "DIVERGED", "left out", "new"]

#: How far two numbers may lie apart that other numerics computed; as in a recovery (ADR 5).
OTHER_NUMERICS = 1e-2


@dataclass(frozen=True)
class Compared:
    """One op, or with `seq` None one run's state after the cycle."""

    run: RunId
    seq: int | None
    what: str
    digest: str
    """What came out now, as a cycle's record has it."""
    verdict: Verdict
    details: str
    """In what it diverged, why it was left out, or what is new in a cycle without an outcome."""


@dataclass(frozen=True)
class RecordedCheckpoints:
    """The checkpoints that a recorded cycle read."""

    cycle: RecordedCycle
    layout: Callable[[AdapterSpec], Layout]

    def host(self, ref: WeightsRef) -> HostWeights:
        """Give weights; raises WeightsMissing where they were gone then."""
        if ref not in self.cycle.read.weights:
            raise WeightsMissing(ref)
        return self.cycle.read.weights[ref]

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        """Give the optimizer state that was saved with weights, if any; raises WeightsMissing."""
        if ref not in self.cycle.read.optimizers:
            raise WeightsMissing(ref)
        return self.cycle.read.optimizers[ref]

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return where the matrices of such an adapter lie in its arena."""
        return self.layout(spec)


def engine_for(facts: CycleFacts, base_model: str | None, device: str | None) -> Engine:
    """Load the base model as the recording worker did, as far as this machine can.

    Raises OSError if there is no such model, UnsupportedModel if it is none that can be trained.
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
    )


def tolerance_of(then: Numerics, now: Numerics) -> float:
    """Return how far numbers may lie apart: nothing on a CPU with the numerics that were recorded.

    On CUDA the same plan gives the same bits, but how a cycle was run (halved for want of memory, op by
    op after a crash) is not part of the plan.
    """
    return 0.0 if then == now and now.device == "cpu" else OTHER_NUMERICS


def restore_before(engine: Engine, cycle: RecordedCycle) -> None:
    """Give the engine, which holds none of them, the runs of a cycle as they were before it.

    Raises ValueError if they are of another base model.
    """
    for run, state in cycle.before.items():
        engine.adapters.restore(run, state)


def run_again(engine: Engine, cycle: RecordedCycle, *, everything: bool = False) -> Findings:
    """Run a recorded cycle from where `restore_before` left the engine.

    What failed by an accident (a crash, a full disk) is left out, but with `everything`. A pass that took
    several cycles runs whole in the one it ended in, from the state that all of them began with; in the
    others it changed nothing. Raises whatever a broken engine raises.
    """
    checkpoints = RecordedCheckpoints(cycle, engine.adapters.layout_of)
    outputs: dict[tuple[str, int], Output] = {}
    runnable: list[Op] = []
    for op, body in zip(cycle.facts.step.ops, cycle.bodies, strict=True):
        if was_not_over(cycle, op) or (has_not_run(cycle, op) and not everything):
            continue
        request = engine_op(op, body, checkpoints)
        if isinstance(request, Failure):
            outputs[op.run, op.seq] = request
        else:
            runnable.append(request)
    outputs |= engine.run(runnable).outputs
    op_ids = [(op.run, op.seq) for op in cycle.facts.step.ops]
    return Findings(
        {op_id: fingerprint_of(outputs[op_id]) for op_id in op_ids if op_id in outputs},
        {
            run: fingerprint_of_state(engine.adapters.state(run))
            for run, _ in op_ids
            if run in engine.adapters
        },
    )


def was_not_over(cycle: RecordedCycle, op: QueuedOp) -> bool:
    """Tell whether an op went on in a later cycle, or began there."""
    return cycle.found is not None and (op.run, op.seq) not in cycle.found.by_op


def has_not_run(cycle: RecordedCycle, op: QueuedOp) -> bool:
    """Tell whether an op failed by an accident, and so did nothing to its run."""
    return cycle.found is not None and cycle.found.by_op[op.run, op.seq].is_accident


def compared(cycle: RecordedCycle, again: Findings, tolerance: float) -> Iterator[Compared]:
    """Compare what came out of a cycle then and now: every op, then every run's state.

    To the bit where `tolerance` is 0. A cycle without an outcome has nothing to compare with.
    """
    then = cycle.found or Findings({}, {})
    for op in cycle.facts.step.ops:
        op_id = op.run, op.seq
        pair = then.by_op.get(op_id), again.by_op.get(op_id)
        yield _compared(op.run, op.seq, op.kind.value, pair, tolerance)
    for run in dict.fromkeys([*then.by_run, *again.by_run]):
        states = then.by_run.get(run), again.by_run.get(run)
        yield _compared(run, None, "state after", states, tolerance)


def _compared(
    run: RunId,
    seq: int | None,
    what: str,
    pair: tuple[Fingerprint | None, Fingerprint | None],
    tolerance: float,
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
