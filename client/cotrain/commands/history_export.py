"""The history of a run for other programs: TensorBoard, Weights & Biases, trackio.

None of them comes with cotrain: each is imported when it is asked for.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cotrain.errors import CotrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cotrain.wire.rest import HistoryPoint

    Export = Callable[[str, Sequence[HistoryPoint], Path, str], str]


class Target(StrEnum):
    """A program that draws curves."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class NotInstalled(CotrainError):
    """The program that shall show a history is not installed here."""


def folder_name(run: str) -> str:
    """Name a run as a folder may be named everywhere."""
    return run.replace(":", "_")


def scalars_of(point: HistoryPoint) -> dict[str, float]:
    """Name what a point shows; an evaluation apart from the steps."""
    if point.kind == "forward":
        return {"evaluation/loss": point.loss, "evaluation/loss_sum": point.loss_sum}
    shown = {
        "train/loss": point.loss,
        "train/loss_sum": point.loss_sum,
        "train/grad_norm": point.grad_norm,
        "train/learning_rate": point.learning_rate,
        "train/run_tokens": float(point.run_tokens),
    }
    return {name: value for name, value in shown.items() if value is not None}


def to_tensorboard(name: str, points: Sequence[HistoryPoint], output: Path, project: str) -> str:
    """Write an event file. TensorBoard keeps 32 bits of each number."""
    event_pb2 = imported("tensorboard.compat.proto.event_pb2")
    summary_pb2 = imported("tensorboard.compat.proto.summary_pb2")
    files = imported("tensorboard.summary.writer.event_file_writer")
    folder = output / name
    writer = files.EventFileWriter(str(folder))
    try:
        for point in points:
            summary = summary_pb2.Summary()
            for tag, value in scalars_of(point).items():
                summary.value.add(tag=tag, simple_value=value)
            at = {"wall_time": point.time_s, "step": point.step}
            writer.add_event(event_pb2.Event(summary=summary, **at))
    finally:
        writer.close()
    return str(folder)


def to_wandb(name: str, points: Sequence[HistoryPoint], output: Path, project: str) -> str:
    """Log to Weights & Biases, as its own variables say: WANDB_MODE, WANDB_API_KEY, …"""
    wandb = imported("wandb")
    output.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=project, id=name, name=name, resume="allow", dir=str(output))
    try:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for point in points:
            run.log({"step": point.step, **scalars_of(point)})
    finally:
        run.finish()
    return f"wandb project {project}"


def to_trackio(name: str, points: Sequence[HistoryPoint], output: Path, project: str) -> str:
    """Log to trackio's own folder on this host."""
    trackio = imported("trackio")
    trackio.init(project=project, name=name)
    try:
        for point in points:
            trackio.log(scalars_of(point), step=point.step)
    finally:
        trackio.finish()
    return f"trackio project {project}"


EXPORTS: dict[Target, Export] = {
    Target.TENSORBOARD: to_tensorboard,
    Target.WANDB: to_wandb,
    Target.TRACKIO: to_trackio,
}


def imported(module: str) -> Any:
    """Import a module of such a program; raises NotInstalled, which says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise NotInstalled(
            f"{error.name or package} is not installed here: pip install {package}"
        ) from error
