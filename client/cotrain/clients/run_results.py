"""Results of several requests of a run: training steps and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from cotrain.errors import UnsupportedInput
from cotrain.wire.datums import Datum, ForwardBackwardOutput
from cotrain.wire.runs import OptimStepResponse
from cotrain.wire.tensors import TensorData

T = TypeVar("T")


@dataclass(frozen=True)
class TrainOutput:
    """Result of a training step: the losses of the pass, before the update, and the optimizer's metrics."""

    forward_backward: ForwardBackwardOutput
    optim_step: OptimStepResponse

    @property
    def loss(self) -> float:
        """The loss of the batch; see `ForwardBackwardOutput.loss`."""
        return self.forward_backward.loss

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """Named arrays for each datum in the order sent, as in `ForwardBackwardOutput`."""
        return self.forward_backward.loss_fn_outputs

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of both requests. If both have a name, the pass's value is returned."""
        return {**(self.optim_step.metrics or {}), **self.forward_backward.metrics}


@dataclass(frozen=True)
class Evaluation:
    """Result of `run.evaluate`."""

    loss_sum: float
    """Sum of the loss over all datums."""
    weight_sum: float
    """Sum of the weights, or the number of non-zero advantages if the loss has no weights."""
    tokens: int
    """Number of targets with a non-zero weight or advantage."""
    loss_fn_outputs: list[dict[str, TensorData]]
    """Named arrays for each datum in the order sent, as in `ForwardBackwardOutput`."""

    @property
    def loss(self) -> float:
        """Loss per weight; the sum if the weights sum to 0."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else self.loss_sum

    @property
    def nll(self) -> float:
        """Negative log-likelihood in nats per token, of `cross_entropy`; the same number as `loss`."""
        return self.loss

    @override
    def __repr__(self) -> str:
        return f"Evaluation(loss={self.loss:.6g}, tokens={self.tokens})"


def weights_of(data: Sequence[Datum]) -> tuple[float, int]:
    """Return the sum of the weights of datums, and the number of targets with a non-zero weight or advantage.

    Without weights, each of these targets counts as 1. Without advantages too, all targets count.
    """
    total, count = 0.0, 0
    for datum in data:
        inputs = datum.loss_fn_inputs
        weights = inputs.get("weights")
        if weights is not None:
            total += math.fsum(weights.data)
            count += sum(weight != 0 for weight in weights.data)
            continue
        advantages = inputs.get("advantages")
        if advantages is None:
            targets = len(inputs["target_tokens"].data)
        else:
            targets = sum(value != 0 for value in advantages.data)
        total, count = total + targets, count + targets
    return total, count


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as finite floats. Raises UnsupportedInput, which names the metric."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)  # of Python, NumPy and torch
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UnsupportedInput(f"metrics[{name!r}] is {value!r:.80}: it must be a finite number")
        found[name] = number
    return found
