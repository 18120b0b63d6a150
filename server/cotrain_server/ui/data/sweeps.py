"""Data of the page Compare about settings: loss by learning rate, and parallel coordinates. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain.wire.rest import HistoryPoint
from cotrain_server.ui.data.activity import chart
from cotrain_server.ui.data.runs import label_of, mean_loss, short_id
from cotrain_store.messages.runs import RunRecord

#: Sizes of the drawing in its own units.
WIDTH, HEIGHT, MARGIN = 720, 260, 40
#: An axis is logarithmic if its largest value is at least this multiple of its smallest, above 0.
DECADE = 10.0
LOSS = "last loss"
#: Entries of a run's metadata that are numbers, but no settings.
_NOT_SETTINGS = frozenset({"trial"})


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
