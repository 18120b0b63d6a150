"""A run's history as curves: per step, of one run or of several next to each other. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from cotrain_server.ui.data.runs import mean_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cotrain_store.messages.history import HistoryPoint
    from cotrain_store.messages.ids import RunId

MOST_COMPARED = 8

Measure = tuple[str, str, str]
"""Name, heading, unit."""
MEASURES: Sequence[Measure] = (
    ("loss", "Loss", "per weight"),
    ("grad_norm", "Gradient norm", ""),
    ("learning_rate", "Learning rate", ""),
    ("tokens_per_s", "Tokens per second", "tokens/s"),
)


def curves_of(histories: Mapping[RunId, Sequence[HistoryPoint]]) -> list[dict[str, Any]]:
    """Draw each measure over optimizer steps, one series for each run; a chart without a number is left out."""
    steps = {
        run: [point for point in points if point.kind == "optim_step"]
        for run, points in histories.items()
    }
    axis = sorted({point.step for points in steps.values() for point in points})
    charts = []
    for name, heading, unit in MEASURES:
        series = [
            {
                "label": _short(run) if len(steps) > 1 else heading,
                "values": _on_axis(axis, points, _VALUES[name](points)),
            }
            for run, points in steps.items()
        ]
        if any(value is not None for each in series for value in each["values"]):
            charts.append(
                {"name": name, "heading": heading, "unit": unit, "x": axis, "series": series}
            )
    return charts


def evaluation_of(points: Sequence[HistoryPoint]) -> dict[str, Any] | None:
    """Draw the loss of forwards without a gradient, over the step after which they ran; None without any."""
    seen = {point.step: mean_loss(point) for point in points if point.kind == "forward"}
    if not any(value is not None for value in seen.values()):
        return None
    axis = sorted(seen)
    series = [{"label": "evaluation", "values": [seen[step] for step in axis]}]
    return {
        "name": "evaluation",
        "heading": "Loss of evaluations",
        "unit": "per weight",
        "x": axis,
        "series": series,
    }


def _short(run: RunId) -> str:
    """Name a run in a legend: the start of its session, and its number there."""
    session, _, number = run.partition(":train:")
    return f"{session[:6]}… {number}"


def _on_axis(
    axis: Sequence[int], points: Sequence[HistoryPoint], values: Sequence[float | None]
) -> list[float | None]:
    by_step = {point.step: value for point, value in zip(points, values, strict=True)}
    return [by_step.get(step) for step in axis]


def _speeds(points: Sequence[HistoryPoint]) -> list[float | None]:
    """Give the tokens of each step over the time since the one before; None for the first one."""
    speeds: list[float | None] = [None] if points else []
    for before, point in itertools.pairwise(points):
        took_s = point.time_s - before.time_s
        tokens = point.run_tokens - before.run_tokens
        speeds.append(tokens / took_s if took_s > 0 else None)
    return speeds


_VALUES: Mapping[str, Callable[[Sequence[HistoryPoint]], list[float | None]]] = {
    "loss": lambda points: [mean_loss(point) for point in points],
    "grad_norm": lambda points: [point.grad_norm for point in points],
    "learning_rate": lambda points: [point.learning_rate for point in points],
    "tokens_per_s": _speeds,
}
