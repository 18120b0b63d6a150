"""History of a run, as the client receives it: points of its optimizer steps, evaluations and metrics."""

import struct
from collections.abc import Iterable
from typing import Literal

from cotrain.wire.rest import HistoryPoint, MetricPoint
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId
from cotrain_store.redis_client.connection import Connection

PointKind = Literal["optim_step", "forward"]
#: Format of a point in `scripts/lib/history.lua`: ordinal, step, seq, time, loss, weight, gradient
#: norm, learning rate, tokens, tokens of the run, passes. Then follows the drift of policy losses, the last nine
#: fields of `PassEntry` (`runs.py`); points without it are shorter. Doubles are stored bit for bit.
POINT = struct.Struct("<IIQdddddQQIddddddddd")
#: Format of a metric's point in `scripts/lib/history.lua`: ordinal, step, seq, time, sum, weight.
METRIC_POINT = struct.Struct("<IIQddd")


async def read_history(connection: Connection, run: RunId, after_step: int = -1) -> list[HistoryPoint]:
    """Return the points after a step of a run, in the order of its log. The caller has checked the tenant."""
    pipeline = connection.pipeline(transaction=True)  # a transaction, because a rollback cuts both lists at once
    pipeline.lrange(redis_keys.steps(run), 0, -1)
    pipeline.lrange(redis_keys.evaluations(run), 0, -1)
    steps, evaluations = await pipeline.execute()
    points = read_points("optim_step", steps) + read_points("forward", evaluations)
    return sorted((p for p in points if p.step > after_step), key=lambda point: point.seq)


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


async def read_metrics(connection: Connection, run: RunId, after_step: int = -1) -> dict[str, list[MetricPoint]]:
    """Return the points of a run's own metrics after a step, by name. The caller has checked the tenant."""
    names = sorted(await metric_names(connection, run))
    pipeline = connection.pipeline(transaction=True)
    for name in names:
        pipeline.lrange(redis_keys.metric(run, name), 0, -1)
    rows = await pipeline.execute() if names else []
    found = {
        name: [point for point in read_metric(row) if point.step > after_step]
        for name, row in zip(names, rows, strict=True)
    }
    return {name: points for name, points in found.items() if points}


def read_metric(stored: Iterable[bytes]) -> list[MetricPoint]:
    """Return the points of one metric, in order, from the rows that the script packed."""
    points, before = [], 0
    for row in stored:
        number, step, seq, time_s, total, weight = METRIC_POINT.unpack(row)
        value = total / weight if weight > 0 else total
        points.append(MetricPoint(step=step, steps=number - before, seq=seq, time_s=time_s, value=value))
        before = number
    return points


async def metric_names(connection: Connection, run: RunId) -> frozenset[str]:
    """Return the names of a run's own metrics. The caller has checked the tenant."""
    return frozenset(name.decode() for name in await connection.hkeys(redis_keys.metric_names(run)))
