"""A loss of the caller's own, written in torch over the log-probs that the server computes.

The server runs a forward; here the loss is taken of its log-probs and differentiated by them; the
server runs a backward of cross-entropy, `-sum(weight * logprob)`, with minus that derivative as its
weights. By the chain rule its gradient is the loss's own. Torch is needed here, and only here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, SupportsFloat

from cotrain.errors import TorchMissing, UnsupportedInput
from cotrain.wire.datums import Datum, datums_of
from cotrain.wire.runs import ForwardBackwardOutput
from cotrain.wire.tensors import TensorData

LossFn = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, SupportsFloat]]]
"""Of the datums and their log-probs (float32 tensors, of the shape of each datum's
`target_tokens`): the loss, a tensor, and numbers to put among the metrics."""

TARGETS, WEIGHTS = "target_tokens", "weights"

# Losses are taken one at a time, whatever clients they belong to: a caller's code need not expect to
# run in two threads at once.
_one_at_a_time = threading.Lock()


class CustomLoss:
    """One use of a loss: on one batch, once."""

    def __init__(self, data: Sequence[Datum], loss_fn: LossFn) -> None:
        """Keep what the loss is of. Raises TorchMissing, or UnsupportedInput for what is no datum."""
        self._torch = _torch()
        self._data = datums_of(data)
        self._loss_fn = loss_fn
        self._metrics: dict[str, float] = {}

    def forward_data(self) -> list[Datum]:
        """Give what the forward is of: only targets and weights, which are 0 where there are none.

        Raises UnsupportedInput where there is no datum, or one has no targets.
        """
        if not self._data:
            raise UnsupportedInput("a custom loss needs at least one datum")
        return [_forward_datum(index, datum) for index, datum in enumerate(self._data)]

    def datums(self, forward: ForwardBackwardOutput) -> list[Datum]:
        """Take the loss, and give the backward's datums: minus its slopes as weights."""
        rows = [
            output["logprobs"].to_torch().requires_grad_() for output in forward.loss_fn_outputs
        ]
        with _one_at_a_time:
            loss, metrics = _both(self._loss_fn(self._data, rows))
            loss.sum().backward()
        self._metrics = {name: _number(value) for name, value in metrics.items()}
        self._metrics["loss:sum"] = _number(loss.sum())
        return [
            _linear_datum(datum, self._slope_of(row))
            for datum, row in zip(self._data, rows, strict=True)
        ]

    def finish(self, backward: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Give the backward's output the loss's own metrics; `surrogate_loss:sum` was its loss."""
        metrics = dict(backward.metrics)
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
        return backward.model_copy(update={"metrics": metrics | self._metrics})

    def _slope_of(self, row: Any) -> Any:
        # A loss may leave a datum out.
        return self._torch.zeros_like(row) if row.grad is None else row.grad


def _both(returned: Any) -> tuple[Any, Mapping[str, SupportsFloat]]:
    match returned:
        case (loss, metrics) if getattr(loss, "requires_grad", False):
            return loss, metrics
        case (_, _):
            raise ValueError("a custom loss must be a tensor that depends on the log-probs")
    raise TypeError("a custom loss must return (loss, metrics), such as `return loss, {}`")


def _forward_datum(index: int, datum: Datum) -> Datum:
    targets = datum.loss_fn_inputs.get(TARGETS)
    if targets is None:
        raise UnsupportedInput(f"data[{index}].loss_fn_inputs.{TARGETS} is missing")
    weights = datum.loss_fn_inputs.get(WEIGHTS)
    if weights is None:
        size = len(targets.data)
        weights = TensorData(data=[0.0] * size, dtype="float32", shape=targets.shape)
    return Datum(model_input=datum.model_input, loss_fn_inputs={TARGETS: targets, WEIGHTS: weights})


def _linear_datum(datum: Datum, slope: Any) -> Datum:
    inputs = {TARGETS: datum.loss_fn_inputs[TARGETS], WEIGHTS: TensorData.of(-slope)}
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as missing:
        raise TorchMissing(
            "a custom loss is differentiated here, by torch: pip install torch. A loss whose slopes "
            "you know needs none: forward(), then forward_backward(…, 'cross_entropy') with minus "
            "the slopes as weights"
        ) from missing
