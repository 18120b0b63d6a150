"""Points of a run's history, as the client receives them, from the rows of the scripts."""

import struct
from collections.abc import Iterable
from typing import Literal

from cotrain.wire.rest import HistoryPoint, MetricPoint

PointKind = Literal["optim_step", "forward"]

#: Format of a point in `scripts/lib/history.lua`: ordinal, step, seq, time, loss, weight, gradient
#: norm, learning rate, tokens, tokens of the run, passes. Then follows the drift of policy losses, the last nine
#: fields of `PassEntry` (`runs.py`); points without it are shorter. Doubles are stored bit for bit.
POINT = struct.Struct("<IIQdddddQQIddddddddd")
#: Format of a metric's point in `scripts/lib/history.lua`: ordinal, step, seq, time, sum, weight.
METRIC_POINT = struct.Struct("<IIQddd")


def read_metric(stored: Iterable[bytes]) -> list[MetricPoint]:
    """Return the points of one metric, in order, from the rows that the script packed."""
    points, before = [], 0
    for row in stored:
        number, step, seq, time_s, total, weight = METRIC_POINT.unpack(row)
        value = total / weight if weight > 0 else total
        points.append(MetricPoint(step=step, steps=number - before, seq=seq, time_s=time_s, value=value))
        before = number
    return points


def read_points(kind: PointKind, stored: Iterable[bytes]) -> list[HistoryPoint]:
    """Return the points of one kind, in order, from the rows that the script packed."""
    points, before = [], 0
    for row in stored:
        whole = POINT.unpack(row.ljust(POINT.size, b"\0"))
        number, step, seq, time_s, loss, weight, norm, rate, tokens, run_tokens, passes = whole[:11]
        sampled, gap, gap_max, effective, bounded, clipped, lagged, lag, lag_max = whole[11:]
        is_step = kind == "optim_step"
        points.append(
            HistoryPoint(
                kind=kind,
                step=step,
                steps=number - before,
                seq=seq,
                time_s=time_s,
                loss_sum=loss,
                weight_sum=weight,
                grad_norm=norm if is_step else None,
                learning_rate=rate if is_step else None,
                tokens=tokens,
                run_tokens=run_tokens,
                passes=passes,
                rollout_gap=gap / sampled if sampled else None,
                rollout_gap_max=gap_max if sampled else None,
                effective_sample_size=effective / sampled if sampled else None,
                clip_fraction=clipped / bounded if bounded else None,
                policy_lag=lag / lagged if lagged else None,
                policy_lag_max=lag_max if lagged else None,
            )
        )
        before = number
    return points
