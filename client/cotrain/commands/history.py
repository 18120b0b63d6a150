"""`cotrain runs history` and `cotrain runs export`: what the steps of a run found."""

from __future__ import annotations

import csv
import sys
from pathlib import Path  # typer reads the annotation at run time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cotrain.commands.history_export import EXPORTS, Target, folder_name
from cotrain.commands.terminal import (
    AsJson,
    opened,
    print_json,
    print_rich,
)
from cotrain.wire.rest import HistoryPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

RunId = Annotated[str, typer.Argument(metavar="RUN", help="Its id.")]
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 60
"""Characters of a curve at most."""


def history(
    run: RunId,
    last: Annotated[int | None, typer.Option(min=1, help="The newest so many points.")] = None,
    after_step: Annotated[int, typer.Option(min=-1, help="What came after this step.")] = -1,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, to the last digit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show loss, gradient norm and learning rate of a run's steps."""
    with opened() as service:
        found = service.create_rest_client().get_training_run_history(run, after_step).result()
    points = found.points[-last:] if last else found.points
    if as_csv:
        _print_csv(points)
    elif as_json:
        print_json(points)
    else:
        print_rich(history_view(points))


def export(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Their ids.")],
    to: Annotated[Target, typer.Option(help="Which program shall show them.")],
    output: Annotated[Path, typer.Option(help="A folder; each run gets one in it.")] = Path("runs"),
    project: Annotated[str, typer.Option(help="Of wandb or trackio.")] = "cotrain",
) -> None:
    """Write the histories of runs for TensorBoard, Weights & Biases or trackio.

    On this host. wandb goes where it is logged in to; WANDB_MODE=offline writes files only.
    """
    with opened() as service:
        rest = service.create_rest_client()
        histories = {run: rest.get_training_run_history(run).result().points for run in runs}
        for run, points in histories.items():
            where = EXPORTS[to](folder_name(run), points, output, project)
            typer.echo(f"{run}: {len(points)} points to {where}")


def history_view(points: Sequence[HistoryPoint]) -> RenderableType:
    """Draw curves over the steps, and all points as a table."""
    if not points:
        return Text("no optimizer step yet")
    steps = [point for point in points if point.kind == "optim_step"]
    curves = Table("", "first", "last", "", box=None)
    for name, values in (
        ("loss", [point.loss for point in steps]),
        ("gradient norm", [point.grad_norm or 0.0 for point in steps]),
        ("evaluation", [point.loss for point in points if point.kind == "forward"]),
    ):
        if values:
            curves.add_row(name, f"{values[0]:.6g}", f"{values[-1]:.6g}", sparkline(values))
    return Group(curves, Text(), _table(points))


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as bars, the lowest one ▁ and the highest █; of many, every so manyth and the last."""
    every = -(-len(values) // SPARKS)
    shown = list(values[::-1][::every][::-1])
    low, high = min(shown), max(shown)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * 7)] for value in shown)


def _table(points: Sequence[HistoryPoint]) -> Table:
    names = ("step", "kind", "loss", "gradient norm", "learning rate", "tokens", "passes")
    table = Table(*names, box=None)
    for point in points:
        table.add_row(
            str(point.step),
            point.kind,
            f"{point.loss:.6g}",
            "" if point.grad_norm is None else f"{point.grad_norm:.6g}",
            "" if point.learning_rate is None else f"{point.learning_rate:.6g}",
            str(point.tokens),
            str(point.passes),
        )
    return table


def _print_csv(points: Sequence[HistoryPoint]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HistoryPoint.model_fields)
    table.writerows(point.model_dump().values() for point in points)
