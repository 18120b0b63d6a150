"""What the ops of a step add to the histories of their runs."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from cotrain_store.messages.history import PassEntry, StepEntry
from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.ops import (
    OptimStep,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    StepOutput,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cotrain_store.messages.history import HistoryEntry
    from cotrain_store.messages.ids import OpId
    from cotrain_workers.engine.ops import Op, Output


def found_by(
    requests: Iterable[Op], outputs: Mapping[tuple[str, int], Output]
) -> dict[OpId, HistoryEntry]:
    """Sum up the passes and the optimizer steps that are done; one that failed adds nothing."""
    found: dict[OpId, HistoryEntry] = {}
    for request in requests:
        entry = _entry(request, outputs.get((request.run, request.seq)))
        if entry and all(map(isfinite, vars(entry).values())):  # JSON holds no other numbers
            found[RunId(request.run), request.seq] = entry
    return found


def weight_of(request: Pass | ReverseKl) -> float:
    """Sum the weights of a pass up; of a loss without any, count the advantages that are not 0."""
    if isinstance(request, ReverseKl):
        weights = [datum.weights for datum in request.datums]
    elif all("weights" in datum.inputs for datum in request.datums):
        weights = [datum.inputs["weights"] for datum in request.datums]
    else:
        weights = [datum.inputs["advantages"] != 0 for datum in request.datums]
    return float(sum(each.sum(dtype=np.float64) for each in weights))


def _entry(request: Op, output: Output | None) -> HistoryEntry | None:
    match request, output:
        case ((Pass() | ReverseKl()), (PassOutput() | ReverseKlOutput())):
            return PassEntry(output.loss_sum, weight_of(request), not request.needs_grad)
        case OptimStep(), StepOutput(grad_norm):
            return StepEntry(grad_norm, request.learning_rate)
    return None
