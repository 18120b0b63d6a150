"""The history of a run: what its optimizer steps and its evaluations found, a point for each."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Without a quota of its own a tenant's runs may have this many points in all.
HISTORY_POINTS = 500_000

PointKind = Literal["optim_step", "forward"]

#: How `scripts/lib/history.lua` packs a point: ordinal, step, seq, time, loss, weight, gradient norm,
#: learning rate, tokens, tokens of the run, passes. Doubles are kept as they are, to the last bit.
POINT = struct.Struct("<IIQdddddQQI")


@dataclass(frozen=True)
class PassEntry:
    """What a pass that is done adds to its run's history."""

    loss: float
    """`loss:sum` of its result."""
    weight: float
    is_forward: bool
    """Without a gradient: an evaluation."""


@dataclass(frozen=True)
class StepEntry:
    """What an optimizer step that is done adds to its run's history."""

    norm: float
    rate: float


HistoryEntry = PassEntry | StepEntry


@dataclass(frozen=True)
class HistoryPoint:
    """One optimizer step with the passes that went into it, or the forwards between two of those."""

    kind: PointKind
    step: int
    """Optimizer steps of the run up to this one, counted from 1; before a forward, from 0."""
    steps: int
    """How many points in a row this one stands for, itself the last of them: 1 until a history is thinned."""
    seq: int
    """Of the run's log: the optimizer step, or the newest of the forwards."""
    time_s: float
    """When it was committed, in seconds since the epoch."""
    loss_sum: float
    """`loss:sum` of the passes, added up in their order."""
    weight_sum: float
    """Of all weights of the passes; of a loss without weights, the number of advantages other than 0."""
    grad_norm: float | None
    """Before clipping; None for forwards."""
    learning_rate: float | None
    """None for forwards."""
    tokens: int
    """That the base model read in those passes."""
    run_tokens: int
    """The like, of all passes with a gradient since the run began."""
    passes: int


def read_points(kind: PointKind, stored: Iterable[bytes]) -> list[HistoryPoint]:
    """Read the points of one kind, in their order, as the script packed them."""
    points, before = [], 0
    for row in stored:
        number, step, seq, time_s, loss, weight, norm, rate, tokens, run_tokens, passes = (
            POINT.unpack(row)
        )
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
            )
        )
        before = number
    return points
