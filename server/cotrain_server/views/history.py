"""The history of a run as the wire has it, and as a table for other programs."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING

from cotrain.wire.rest import HistoryPoint as WirePoint
from cotrain.wire.rest import TrainingRunHistory
from cotrain_store.messages.history import HistoryPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ids import RunId


def history_of(run: RunId, points: Sequence[HistoryPoint]) -> TrainingRunHistory:
    """Show a history."""
    shown = [WirePoint(**asdict(point)) for point in points]
    return TrainingRunHistory(training_run_id=run, points=shown)


def csv_of(points: Sequence[HistoryPoint]) -> str:
    """Write a history as CSV: a line of names, then one for each point; doubles to their last digit."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(field.name for field in fields(HistoryPoint))
    table.writerows(astuple(point) for point in points)
    return text.getvalue()
