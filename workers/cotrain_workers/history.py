"""Entries of ops in the history of their run: losses, steps, rewinds, and metrics of the client."""

import json
from collections.abc import Mapping
from math import isfinite

import numpy as np

from cotrain_store.messages.ids import decode
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.messages.runs import (
    HistoryEntry,
    MetricsEntry,
    PassEntry,
    RewindEntry,
    StepEntry,
)
from cotrain_workers.engine.ops import (
    NoteOutput,
    Op,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    StepOutput,
)
from cotrain_workers.engine.training.drift import lag_sums


def history_entry(op: QueuedOp, body: bytes, request: Op | None, output: Output | None) -> HistoryEntry | None:
    """Return the entry that an op adds to the history of its run, or None.

    JSON has no NaN and no infinity, so a number that is not finite has no entry.
    """
    entry = _entry(op, body, request, output)
    if entry is None or isinstance(entry, MetricsEntry) or all(map(isfinite, vars(entry).values())):
        return entry
    return None


def _entry(op: QueuedOp, body: bytes, request: Op | None, output: Output | None) -> HistoryEntry | None:
    match request, output:
        case ((Pass() | ReverseKl()) as request, (PassOutput() | ReverseKlOutput()) as output):
            weight = _weight(request)
            drift = output.drift if isinstance(output, PassOutput) else {}
            return PassEntry(
                output.loss_sum,
                weight,
                not request.needs_grad,
                **drift_entry(drift, weight),
                **(lag_sums(request) if isinstance(request, Pass) else {}),
            )
        case OptimStep(learning_rate=learning_rate), StepOutput(grad_norm):
            return StepEntry(grad_norm, learning_rate)
        case _, NoteOutput(answer) if op.kind is OpKind.REWIND:
            return RewindEntry(answer["seq"], answer["step"])
        case _, NoteOutput():
            return decode(MetricsEntry, json.loads(body))
    return None


def drift_entry(drift: Mapping[str, float], rewarded: float) -> dict[str, float]:
    """Return the fields of a PassEntry for the drift of a pass with `rewarded` tokens with an advantage."""
    if "sampled_tokens:sum" not in drift:
        return {}
    sampled = drift["sampled_tokens:sum"]
    is_bounded = "clip_fraction:mean" in drift
    return {
        "sampled": sampled,
        "gap": drift["rollout_gap:mean"] * sampled,
        "gap_max": drift["rollout_gap:max"],
        "effective": drift["effective_sample_size:mean"] * sampled,
        "bounded": rewarded if is_bounded else 0.0,
        "clipped": drift["clip_fraction:mean"] * rewarded if is_bounded else 0.0,
    }


def _weight(request: Pass | ReverseKl) -> float:
    """Return the sum of the weights, or the number of non-zero advantages if the loss has no
    weights. For a custom loss it is the number of datums, over which its losses are summed.
    """
    if isinstance(request, Pass) and request.graph is not None:
        return float(len(request.datums))
    if isinstance(request, ReverseKl):
        weights = [datum.weights for datum in request.datums]
    elif all("weights" in datum.inputs for datum in request.datums):
        weights = [datum.inputs["weights"] for datum in request.datums]
    else:
        weights = [datum.inputs["advantages"] != 0 for datum in request.datums]
    return float(sum(each.sum(dtype=np.float64) for each in weights))
