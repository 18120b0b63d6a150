"""Compare a replayed result with the stored one. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cotrain.wire.proto import wire_pb2
from cotrain_store.messages.results import ResultKind
from cotrain_workers.op_codec import CYCLE_METRIC

if TYPE_CHECKING:
    from cotrain_store.messages.results import Result


def same_result(stored: Result, replayed: Result, *, exact: bool) -> bool:
    """Compare two results but for the cycle they ran in; on CUDA another mix moves the last bits."""
    if stored.kind != replayed.kind:
        return False
    tolerance = 0.0 if exact else 1e-2
    if stored.kind is not ResultKind.PASS:
        return _same_metrics(_json_metrics(stored), _json_metrics(replayed), tolerance)
    before = wire_pb2.ForwardBackwardOutput.FromString(stored.payload)
    after = wire_pb2.ForwardBackwardOutput.FromString(replayed.payload)
    metrics_agree = _same_metrics(dict(before.metrics), dict(after.metrics), tolerance)
    return metrics_agree and _same_logprobs(_logprobs(before), _logprobs(after), tolerance)


def _logprobs(output: wire_pb2.ForwardBackwardOutput) -> np.ndarray:
    records = [record.fields["logprobs"].data for record in output.loss_fn_outputs]
    return np.frombuffer(b"".join(records), "<f4")


def _same_logprobs(before: np.ndarray, after: np.ndarray, tolerance: float) -> bool:
    return before.shape == after.shape and np.allclose(
        before, after, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _json_metrics(result: Result) -> dict[str, float]:
    metrics: dict[str, float] = result.json().get("metrics", {})
    return metrics


def _same_metrics(before: dict[str, float], after: dict[str, float], tolerance: float) -> bool:
    names = (before.keys() | after.keys()) - {CYCLE_METRIC}
    return all(
        name in before
        and name in after
        and math.isclose(before[name], after[name], rel_tol=tolerance, abs_tol=tolerance)
        for name in names
    )
