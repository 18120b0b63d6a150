"""Commands `cotrain runs history` and `cotrain runs export`: metrics of a run's steps.

The export writes files for TensorBoard, Weights & Biases or trackio. None of them is a dependency of cotrain:
each is imported on use.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path  # typer reads the annotation at run time
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cotrain.commands.terminal import AsJson, opened, print_result, table
from cotrain.errors import LibraryMissing
from cotrain.wire.rest import HistoryPoint, MetricPoint, TrainingRunHistory

Export = Callable[[str, TrainingRunHistory, Path, str], str]


Target = Literal["tensorboard", "wandb", "trackio"]
"""Program that draws curves."""

_TRAIN = (
    "loss", "loss_sum", "grad_norm", "learning_rate", "run_tokens", "rollout_gap", "rollout_gap_max",
    "effective_sample_size", "clip_fraction", "policy_lag", "policy_lag_max",
)  # fmt: skip


def scalars_of(point: HistoryPoint) -> dict[str, float]:
    """Return the values of a point by name; evaluations have names of their own."""
    if point.kind == "forward":
        return {"evaluation/loss": point.loss, "evaluation/loss_sum": point.loss_sum}
    shown = {f"train/{name}": getattr(point, name) for name in _TRAIN}
    return {name: float(value) for name, value in shown.items() if value is not None}


def scalars_in(history: TrainingRunHistory) -> list[tuple[HistoryPoint | MetricPoint, dict[str, float]]]:
    """Return each point of a history with its values, in the order of the run's log."""
    found: list[tuple[HistoryPoint | MetricPoint, dict[str, float]]] = []
    found += [(each, scalars_of(each)) for each in history.points]
    for name, own in history.metrics.items():
        found += [(each, {name: each.value}) for each in own]
    return sorted(found, key=lambda pair: pair[0].seq)


def to_tensorboard(name: str, history: TrainingRunHistory, output: Path, project: str) -> str:
    """Write an event file. TensorBoard stores 32 bits of each number."""
    event_pb2 = imported("tensorboard.compat.proto.event_pb2")
    summary_pb2 = imported("tensorboard.compat.proto.summary_pb2")
    files = imported("tensorboard.summary.writer.event_file_writer")
    folder = output / name
    writer = files.EventFileWriter(str(folder))
    try:
        for point, scalars in scalars_in(history):
            summary = summary_pb2.Summary()
            for tag, value in scalars.items():
                summary.value.add(tag=tag, simple_value=value)
            at = {"wall_time": point.time_s, "step": point.step}
            writer.add_event(event_pb2.Event(summary=summary, **at))
    finally:
        writer.close()
    return str(folder)


def to_wandb(name: str, history: TrainingRunHistory, output: Path, project: str) -> str:
    """Log to Weights & Biases, with the settings of its own variables: WANDB_MODE, WANDB_API_KEY, …"""
    wandb = imported("wandb")
    output.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project, id=name, name=name, resume="allow", dir=str(output))
    try:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for point, scalars in scalars_in(history):
            run.log({"step": point.step, **scalars})
    finally:
        run.finish()
    return f"wandb project {project}"


def to_trackio(name: str, history: TrainingRunHistory, output: Path, project: str) -> str:
    """Log to trackio's own folder on this host."""
    trackio = imported("trackio")
    trackio.init(project=project, name=name)
    try:
        for point, scalars in scalars_in(history):
            trackio.log(scalars, step=point.step)
    finally:
        trackio.finish()
    return f"trackio project {project}"


EXPORTS: dict[Target, Export] = {"tensorboard": to_tensorboard, "wandb": to_wandb, "trackio": to_trackio}


def imported(module: str) -> Any:
    """Import a module of an export program. Raises LibraryMissing, which names the package to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LibraryMissing(f"{error.name or package} is not installed here: pip install {package}") from error


RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 60
"""Maximum width of a curve in characters."""


def history(
    run: RunId,
    last: Annotated[int | None, typer.Option(min=1, help="Number of newest points.")] = None,
    after_step: Annotated[int, typer.Option(min=-1, help="Points after this step.")] = -1,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with all digits.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show loss, gradient norm and learning rate of a run's steps."""
    with opened() as service:
        found = service.create_rest_client().get_training_run_history(run, after_step).result()
    points = found.points[-last:] if last else found.points
    if as_csv:
        _print_csv(points)
    else:
        print_result(points, history_view(points, found.metrics), as_json=as_json)


def export(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Ids of the runs.")],
    to: Annotated[Target, typer.Option(help="Program that draws the curves.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder with a folder for each run.")] = Path("runs"),
    project: Annotated[str, typer.Option(help="Project of wandb or trackio.")] = "cotrain",
) -> None:
    """Export the histories of runs to TensorBoard, Weights & Biases or trackio.

    Files are written on this host. wandb uses its own login; WANDB_MODE=offline writes files only.
    """
    with opened() as service:
        rest = service.create_rest_client()
        histories = {run: rest.get_training_run_history(run).result() for run in runs}
        for run, history in histories.items():
            name = run.replace(":", "_")  # valid as a folder on every system
            where = EXPORTS[to](name, history, output, project)
            typer.echo(f"{run}: {len(scalars_in(history))} points to {where}")


def history_view(points: Sequence[HistoryPoint], metrics: Mapping[str, Sequence[MetricPoint]]) -> RenderableType:
    """Return curves over the steps, and a table of all points."""
    if not points and not metrics:
        return Text("no optimizer step yet")
    steps = [point for point in points if point.kind == "optim_step"]
    curves = (
        ("loss", [point.loss for point in steps]),
        ("gradient norm", [point.grad_norm or 0.0 for point in steps]),
        ("evaluation", [point.loss for point in points if point.kind == "forward"]),
        *((name, [point.value for point in own]) for name, own in metrics.items()),
    )
    return Group(
        table(
            ("", "first", "last", ""),
            ((name, _digits(values[0]), _digits(values[-1]), sparkline(values)) for name, values in curves if values),
        ),
        Text(),
        _table(points),
    )


def sparkline(values: Sequence[float]) -> str:
    """Return numbers as bars from ▁ (lowest) to █ (highest). Long series are sampled evenly, with the last value."""
    every = -(-len(values) // SPARKS)
    shown = list(values[::-1][::every][::-1])
    low, high = min(shown), max(shown)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * 7)] for value in shown)


def _table(points: Sequence[HistoryPoint]) -> Table:
    return table(
        ("step", "kind", "loss", "gradient norm", "learning rate", "tokens", "passes"),
        (
            (
                point.step,
                point.kind,
                _digits(point.loss),
                _digits(point.grad_norm),
                _digits(point.learning_rate),
                point.tokens,
                point.passes,
            )
            for point in points
        ),
    )


def _digits(number: float | None) -> str | None:
    return None if number is None else f"{number:.6g}"


def _print_csv(points: Sequence[HistoryPoint]) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(HistoryPoint.model_fields)
    rows.writerows(point.model_dump().values() for point in points)
