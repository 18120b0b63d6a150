"""A custom loss, written in torch over the log-probs that the server computes.

The server runs a forward. This client computes the loss of its log-probs and differentiates it. The
server then runs a backward of cross-entropy, `-sum(weight * logprob)`, with the negated derivative as
weights. By the chain rule, its gradient is that of the custom loss. Only this module needs torch.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, SupportsFloat

from cotrain.errors import TorchMissing, UnsupportedInput
from cotrain.wire.datums import Datum, datums_of
from cotrain.wire.runs import ForwardBackwardOutput
from cotrain.wire.tensors import TensorData

LossFn = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, SupportsFloat]]]
"""Maps the datums and their log-probs (float32 tensors, each with the shape of the datum's
`target_tokens`) to the loss, a tensor, and a dict of numbers for the metrics."""

TARGETS, WEIGHTS = "target_tokens", "weights"

# Custom losses of all clients run one at a time, so that user code need not be thread-safe.
_one_at_a_time = threading.Lock()


class CustomLoss:
    """One evaluation of a custom loss on one batch."""

    def __init__(self, data: Sequence[Datum], loss_fn: LossFn) -> None:
        """Store the batch and the loss. Raises TorchMissing, or UnsupportedInput for an invalid datum."""
        self._torch = _torch()
        self._data = datums_of(data)
        self._loss_fn = loss_fn
        self._metrics: dict[str, float] = {}

    def forward_data(self) -> list[Datum]:
        """Return the datums of the forward: only targets and weights, with missing weights as zeros.

        Raises UnsupportedInput if the batch is empty or a datum has no targets.
        """
        if not self._data:
            raise UnsupportedInput("a custom loss needs at least one datum")
        return [_forward_datum(index, datum) for index, datum in enumerate(self._data)]

    def datums(self, forward: ForwardBackwardOutput) -> list[Datum]:
        """Compute the loss and return the backward's datums, with negated derivatives as weights."""
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
        """Merge the custom metrics into the backward's output, whose own loss becomes `surrogate_loss:sum`."""
        metrics = dict(backward.metrics)
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
        return backward.model_copy(update={"metrics": metrics | self._metrics})

    def _slope_of(self, row: Any) -> Any:
        # The loss may not depend on every datum.
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
    return _with_inputs(datum, {TARGETS: targets, WEIGHTS: weights})


def _linear_datum(datum: Datum, slope: Any) -> Datum:
    return _with_inputs(
        datum, {TARGETS: datum.loss_fn_inputs[TARGETS], WEIGHTS: TensorData.of(-slope)}
    )


def _with_inputs(datum: Datum, inputs: dict[str, TensorData]) -> Datum:
    return Datum(datum.model_input, inputs, routed_experts=datum.routed_experts)


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
