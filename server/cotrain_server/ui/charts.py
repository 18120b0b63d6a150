"""Data of charts: the last hour of a pool, the curves of runs, and the results of a sweep by its settings. Pure."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain.wire.rest import HistoryPoint, MetricPoint
from cotrain_server.ui.run_tables import label_of, short_id
from cotrain_server.views.records import mean_loss
from cotrain_store.messages.ids import RunId
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring.recent_activity import Minute

MINUTE_S = 60.0
#: Number of minutes in the summary below a chart.
RECENT = 15
PHASES = ("train", "optim", "sample")
#: Sizes of the drawing in its own units.
WIDTH, HEIGHT, MARGIN = 720, 260, 40
#: An axis is logarithmic if its largest value is at least this multiple of its smallest, above 0.
DECADE = 10.0
LOSS = "last loss"
#: Entries of a run's metadata that are numbers, but no settings.
_NOT_SETTINGS = frozenset({"trial"})
#: Maximum number of compared runs.
MAX_COMPARED = 64
Measure = tuple[str, str, str]
"""Name, heading, unit."""
MEASURES: Sequence[Measure] = (
    ("loss", "Loss", "nats per token"),
    ("grad_norm", "Gradient norm", ""),
    ("learning_rate", "Learning rate", ""),
    ("rollout_gap", "Rollout gap", "nats per token"),
    ("effective_sample_size", "Effective sample size", "share of tokens"),
    ("clip_fraction", "Clipped", "share of tokens"),
    ("policy_lag", "Policy lag", "optimizer steps"),
    ("tokens_per_s", "Tokens per second", "tokens/s"),
)


def activity_of(minutes: Sequence[Minute], workers: int, now: float) -> dict[str, Any]:
    """Return the charts of a pool: tokens per second and device use per minute.

    Sampling time counts when a request ends. The parts of a minute never exceed the whole.
    """
    duty = [_duty(minute, max(workers, 1) * _span_s(minute, now)) for minute in minutes]
    recent_s = sum(_span_s(minute, now) for minute in minutes[-RECENT:])
    return {
        "starts": [minute.start_s for minute in minutes],
        "tokens_per_s": _rates(minutes, "tokens", now),
        "sampled_per_s": _rates(minutes, "sampled_tokens", now),
        "duty": duty,
        "recent": {
            "tokens_per_s": _sum(minutes, "tokens") / recent_s,
            "sampled_per_s": _sum(minutes, "sampled_tokens") / recent_s,
            "cycles": _sum(minutes, "cycles"),
            "failed": _sum(minutes, "failed"),
            "padding": _padding(minutes),
            **{phase: _mean(duty, phase) for phase in (*PHASES, "idle")},
        },
    }


def own_activity_of(minutes: Sequence[Minute], now: float) -> dict[str, Any]:
    """Return a tenant's charts, which contain only its own usage."""
    return {
        "starts": [minute.start_s for minute in minutes],
        "tokens_per_s": _rates(minutes, "own_tokens", now),
        "device": [round(min(1.0, minute.of("own_device_s") / _span_s(minute, now)), 4) for minute in minutes],
        "device_s": sum(minute.of("own_device_s") for minute in minutes),
        "tokens": sum(minute.of("own_tokens") for minute in minutes),
    }


def _rates(minutes: Sequence[Minute], name: str, now: float) -> list[float]:
    """Return an amount of each minute per second."""
    return [round(minute.of(name) / _span_s(minute, now), 3) for minute in minutes]


def _span_s(minute: Minute, now: float) -> float:
    """Return the elapsed seconds of a minute."""
    return min(MINUTE_S, max(1.0, now - minute.start_s))


def _duty(minute: Minute, device_s: float) -> dict[str, float]:
    parts = {phase: min(1.0, minute.of(f"{phase}_s") / device_s) for phase in PHASES}
    too_much = max(1.0, sum(parts.values()))
    shares = {phase: round(part / too_much, 4) for phase, part in parts.items()}
    return {**shares, "idle": round(max(0.0, 1.0 - sum(shares.values())), 4)}


def _sum(minutes: Sequence[Minute], name: str) -> float:
    return sum(minute.of(name) for minute in minutes[-RECENT:])


def _padding(minutes: Sequence[Minute]) -> float:
    padding, tokens = _sum(minutes, "padding_tokens"), _sum(minutes, "tokens")
    return padding / (padding + tokens) if padding else 0.0


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    recent = rows[-RECENT:]
    return sum(row[name] for row in recent) / len(recent) if recent else 0.0


def curves_of(
    histories: Mapping[RunId, Sequence[HistoryPoint]], labels: Mapping[RunId, str] | None = None
) -> list[dict[str, Any]]:
    """Return a chart per measure over optimizer steps, with a series per run.

    A series of several has the label of its run, or its short id. Charts without values are omitted.
    """
    shown = labels or {}
    steps = {run: [point for point in points if point.kind == "optim_step"] for run, points in histories.items()}
    axis = sorted({point.step for points in steps.values() for point in points})
    charts = []
    for name, heading, unit in MEASURES:
        series = [
            {
                "label": shown.get(run) or short_id(run) if len(steps) > 1 else heading,
                "values": _on_axis(axis, points, _values(name, points)),
            }
            for run, points in steps.items()
        ]
        if any(value is not None for each in series for value in each["values"]):
            charts.append(chart(name, heading, unit, axis, series))
    return charts


def evaluation_of(points: Sequence[HistoryPoint]) -> dict[str, Any] | None:
    """Return the chart of the loss of forwards without a gradient, over the preceding step. None without values."""
    seen = {point.step: mean_loss(point) for point in points if point.kind == "forward"}
    if not any(value is not None for value in seen.values()):
        return None
    axis = sorted(seen)
    series = [{"label": "evaluation", "values": [seen[step] for step in axis]}]
    return chart("evaluation", "Loss of evaluations", "nats per token", axis, series)


def metric_charts(metrics: Mapping[str, Sequence[MetricPoint]]) -> list[dict[str, Any]]:
    """Return a chart per own metric over the steps; the newest value of a step counts."""
    charts = []
    for number, (name, points) in enumerate(metrics.items()):
        by_step = {point.step: point.value for point in points}
        axis = sorted(by_step)
        series = [{"label": name, "values": [by_step[step] for step in axis]}]
        charts.append(chart(f"metric-{number}", name, "", axis, series))
    return charts


def chart(name: str, heading: str, unit: str, x: Sequence[float], series: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart for the pages' script."""
    return {"name": name, "heading": heading, "unit": unit, "x": x, "series": series}


def _on_axis(axis: Sequence[int], points: Sequence[HistoryPoint], values: Sequence[float | None]) -> list[float | None]:
    by_step = {point.step: value for point, value in zip(points, values, strict=True)}
    return [by_step.get(step) for step in axis]


def _speeds(points: Sequence[HistoryPoint]) -> list[float | None]:
    """Return the tokens of each step per second since the previous step; None for the first one."""
    speeds: list[float | None] = [None] if points else []
    for before, point in itertools.pairwise(points):
        took_s = point.time_s - before.time_s
        tokens = point.run_tokens - before.run_tokens
        speeds.append(tokens / took_s if took_s > 0 else None)
    return speeds


def _values(name: str, points: Sequence[HistoryPoint]) -> list[float | None]:
    if name == "tokens_per_s":
        return _speeds(points)
    return [mean_loss(each) if name == "loss" else getattr(each, name) for each in points]


@dataclass(frozen=True)
class SettingsRow:
    """Settings and result of one run."""

    run: str
    label: str
    settings: Mapping[str, float]
    steps: int
    loss: float | None  # Loss of the last optimizer step in nats per token; None if unknown


def settings_row(run: RunRecord, points: Sequence[HistoryPoint]) -> SettingsRow:
    """Return the settings of a run: the numbers of its metadata, its rank, and its last learning rate."""
    given = {
        name: float(value)
        for name, value in run.user_metadata.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and name not in _NOT_SETTINGS
    }
    steps = [point for point in points if point.kind == "optim_step"]
    last = steps[-1] if steps else None
    if "lr" not in given and last and last.learning_rate is not None:
        given = {"lr": last.learning_rate, **given}
    settings = {**given, "rank": float(run.lora.rank)}
    about = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    label = label_of(run) or (about if "sweep" in run.user_metadata else short_id(run.id))
    return SettingsRow(run.id, label, settings, last.step if last else 0, mean_loss(last))


def loss_by_rate(rows: Sequence[SettingsRow]) -> dict[str, Any] | None:
    """Return the chart of the last loss over the learning rate; None below two rates."""
    found = sorted(
        (row.settings["lr"], row.loss) for row in rows if row.loss is not None and row.settings.get("lr", 0.0) > 0
    )
    if len({rate for rate, _ in found}) < 2:
        return None
    rates, series = ([rate for rate, _ in found], [{"label": LOSS, "values": [loss for _, loss in found]}])
    drawn = chart("loss_by_rate", "Last loss by learning rate", "nats per token", rates, series)
    return {**drawn, "isScatter": True}


def differing(rows: Sequence[SettingsRow]) -> list[str]:
    """Return the settings that differ between runs which all have them, in the order of the first run."""
    names = rows[0].settings if rows else ()
    return [
        name
        for name in names
        if all(name in row.settings for row in rows) and len({row.settings[name] for row in rows}) > 1
    ]


def parallel_coordinates(rows: Sequence[SettingsRow]) -> dict[str, Any] | None:
    """Return the axes and the lines of the drawing; None without two runs that differ and have a loss."""
    shown = [(number, row) for number, row in enumerate(rows) if row.loss is not None]
    names = differing([row for _, row in shown])
    if not names:
        return None
    columns = [
        (name, [row.settings[name] if name != LOSS else row.loss or 0.0 for _, row in shown]) for name in (*names, LOSS)
    ]
    axes, heights = [], []
    for at, (name, values) in enumerate(columns):
        x = MARGIN + at * (WIDTH - 2 * MARGIN) / (len(columns) - 1)
        axes.append({"name": name, "x": round(x), "low": min(values), "high": max(values)})
        heights.append([round(_height(value, values)) for value in values])
    lines = [
        {
            "label": row.label,
            "number": number % 8,
            "points": " ".join(f"{axis['x']},{column[at]}" for axis, column in zip(axes, heights, strict=True)),
        }
        for at, (number, row) in enumerate(shown)
    ]
    return {"width": WIDTH, "height": HEIGHT, "margin": MARGIN, "axes": axes, "lines": lines}


def _height(value: float, values: Sequence[float]) -> float:
    """Return the y of a value; the largest is at the top."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= DECADE:
        value, low, high = math.log(value), math.log(low), math.log(high)
    share = (value - low) / (high - low) if high > low else 0.5
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)
