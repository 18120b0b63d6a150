"""What is kept of a cycle after its results: a record for its history, and numbers for the totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.messages.ops import OpKind
from cotrain_workers.engine.ops import Failure, SaveOutput
from cotrain_workers.recorder.fingerprints import fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cotrain_store.messages.ids import RunId
    from cotrain_store.messages.ops import QueuedOp, Step
    from cotrain_workers.engine.ops import CycleOutput, Output


def cycle_record(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    cost: CycleOutput | None,
    started: float,
    finished: float,
) -> dict[str, Any]:
    """Sum a cycle up for its history: who was in it, how much, how long each wave took.

    A digest stands for what came of each op, whichever cycle it ran in: `cotrain replay` shows it, too.
    Saves have none: their weights are stored under the digest of all their content.
    """
    runs: dict[RunId, dict[str, Any]] = {}
    for op in step.ops:
        row = runs.setdefault(op.run, {"run": op.run, "tenant": step.tenant_by_run[op.run],
                                       "tokens": 0, "ops": {}, "failed": 0, "digests": {}})  # fmt: skip
        row["tokens"] += op.tokens
        row["ops"][op.kind.value] = row["ops"].get(op.kind.value, 0) + 1
        output = outputs[op.run, op.seq]
        row["failed"] += isinstance(output, Failure)
        if not isinstance(output, SaveOutput):
            row["digests"][str(op.seq)] = fingerprint_of(output).digest
    return {
        "cycle": step.cycle,
        "worker": step.worker,
        "planned_at": step.planned_at,
        "started_at": started,
        "duration_ms": round((finished - started) * 1000, 3),
        "wave_ms": round(cost.wave_s * 1000, 3) if cost else None,
        "optim_ms": round(cost.optim_s * 1000, 3) if cost else None,
        "sampling_ms": round(cost.beside_s * 1000, 3) if cost else None,
        "tokens": sum(op.tokens for op in step.ops),
        "padded_tokens": cost.padded_tokens if cost else None,
        "forwards": cost.forwards if cost else None,
        "outcome": "ok" if cost else "isolated",
        "runs": list(runs.values()),
    }


def counted_cycle(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    cost: CycleOutput | None,
    record: Mapping[str, Any],
) -> dict[str, float]:
    """Count what this cycle adds to the pool's totals (`metrics.POOL_COUNTERS`)."""
    failed = [output for output in outputs.values() if isinstance(output, Failure)]
    return {
        "cycles": 1,
        "cycle_seconds": record["duration_ms"] / 1000,
        "tokens": record["tokens"],
        "padding_tokens": cost.padded_tokens - cost.tokens if cost else 0,
        "forwards": cost.forwards if cost else 0,
        "optim_steps": _count(step.ops, OpKind.OPTIM_STEP),
        "resolved_ops": len(step.ops),
        "failed_ops": len(failed),
        "nonfinite": sum("not finite" in failure.message for failure in failed),
    }


def _count(ops: Sequence[QueuedOp], kind: OpKind) -> int:
    return sum(op.kind is kind for op in ops)
