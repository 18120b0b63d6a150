"""The optimizer steps of a cycle: all finite ones together, each answered by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cotrain_workers.engine.adapters.lifecycle import unknown_run
from cotrain_workers.engine.ops import Failure, StepOutput
from cotrain_workers.engine.training.adamw import (
    Due,
    adamw_steps,
    discard_gradients,
    gradient_norms,
    refuse_step,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.adapters.bank import AdapterBank
    from cotrain_workers.engine.ops import OptimStep, Output


def take_steps(
    bank: AdapterBank, ops: Sequence[OptimStep], outputs: dict[tuple[str, int], Output]
) -> None:
    """Take optimizer steps, at most one of each run, and write an answer to each.

    A gradient that is not finite is discarded, and its step fails alone.
    """
    asked = []
    for op in ops:
        reason = refuse_step(op)
        if op.run not in bank:
            outputs[op.run, op.seq] = unknown_run()
        elif reason:
            outputs[op.run, op.seq] = Failure(reason, "user")
        else:
            asked.append(op)
    norms = gradient_norms([bank[op.run] for op in asked])
    due = [Due(bank[op.run], op, norm) for op, norm in zip(asked, norms, strict=True)]
    finite = [step for step in due if math.isfinite(step.norm)]
    adamw_steps(finite)
    discard_gradients([step.adapter for step in due if not math.isfinite(step.norm)])
    for step in due:
        op = step.op
        outputs[op.run, op.seq] = (
            StepOutput(step.norm) if math.isfinite(step.norm) else not_finite(op)
        )


def not_finite(op: OptimStep) -> Failure:
    """Return the answer to a step whose gradient is not finite."""
    return Failure(f"Gradient is not finite (seq {op.seq}); it was discarded.", "user")
