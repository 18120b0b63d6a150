"""Custom losses, written in torch over the log-probs that the server computes.

A traced loss (`trace`) is sent as a graph and runs on the server, in one pass. Any other function (`CustomLoss`) runs
in this client, in three steps:

1. The server runs a forward and returns log-probs.
2. This client computes the loss of the log-probs and differentiates it.
3. The server runs a backward of cross-entropy, `-sum(weight * logprob)`, with the negated derivative as weights. By
   the chain rule, its gradient is that of the custom loss.
"""

import builtins
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, SupportsFloat

from pydantic import ValidationError

from cotrain.clients.unsupported_arguments import Ready
from cotrain.errors import RequestFailed, TorchMissing, UnsupportedInput
from cotrain.wire.custom_loss import (
    LOGPROBS,
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
    check_loss,
)
from cotrain.wire.custom_loss import CustomLoss as TracedLoss
from cotrain.wire.datums import Datum, ForwardBackwardOutput, datums_of
from cotrain.wire.model import in_a_sentence
from cotrain.wire.tensors import TensorData

LossFn = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, SupportsFloat]]]
"""Maps the datums and their log-probs to the loss, a tensor of one number, and a dict of numbers for the metrics. The
log-probs are float32 tensors, each with the shape of the datum's `target_tokens`."""

PerDatumLossFn = Callable[..., tuple[Any, Mapping[str, Any]]]
"""Maps the log-probs of one datum to a scalar tensor and a dict of scalar tensors. Further arguments name the
`loss_fn_inputs` that it reads. The dict's names are `custom/<name>:sum` or `custom/<name>:mean`."""

TARGETS, WEIGHTS = "target_tokens", "weights"

# Custom losses of all clients run one at a time, so that user code need not be thread-safe.
_loss_lock = threading.Lock()


@dataclass(frozen=True)
class LossHandle(Ready):
    """A loss that the server runs; `forward_backward_custom` accepts it in place of a function."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    loss_id: str


def trace(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]) -> TracedLoss:
    """Trace a loss of one datum to a graph. Raises TorchMissing, or UnsupportedInput, which names the operation."""
    _torch()
    fx = import_module("torch.fx")
    names = list(inspect.signature(fn).parameters)
    if names[:1] != [LOGPROBS] or set(names) != set(input_ranks):
        raise UnsupportedInput(
            f"a custom loss has the parameters logprobs and the loss_fn_inputs it reads, and input_ranks has a rank for each:"
            f" the parameters are {names}, the ranks {dict(input_ranks)}"
        )
    try:
        graph = fx.symbolic_trace(fn).graph
    except Exception as error:
        raise UnsupportedInput(
            f"the loss cannot be traced by torch.fx: {error}. It must not branch on values of tensors. A function that"
            " cannot be traced runs here: run.forward_backward_custom(data, loss_fn)"
        ) from error
    name_of = import_module("torch.fx.node")._get_qualified_name
    try:
        loss = TracedLoss(
            inputs=[CustomLossInput(name=name, rank=input_ranks[name]) for name in names],
            graph=CustomLossGraph(nodes=[_node(node, name_of) for node in graph.nodes]),
        )
    except ValidationError as error:
        raise UnsupportedInput(in_a_sentence(error)) from error
    check_loss(loss)
    return loss


def _node(node: Any, name_of: Callable[[Any], str]) -> CustomLossNode:
    target = name_of(node.target) if node.op == "call_function" else str(node.target)
    return CustomLossNode(
        op=node.op,
        name=node.name,
        target=target.replace("_operator.", "operator.", 1),
        args=[_encoded(arg) for arg in node.args],
        kwargs={name: _encoded(arg) for name, arg in node.kwargs.items()},
    )


def _encoded(arg: Any) -> Any:
    torch = import_module("torch")
    match arg:
        case float() if not math.isfinite(arg):
            return {"float": str(arg)}
        case None | bool() | int() | float() | str():
            return arg
        case list():
            return [_encoded(each) for each in arg]
        case tuple():
            return {"tuple": [_encoded(each) for each in arg]}
        case dict():
            return {"dict": {str(name): _encoded(each) for name, each in arg.items()}}
        case slice():
            return {"slice": [_encoded(each) for each in (arg.start, arg.stop, arg.step)]}
        case builtins.Ellipsis:
            return {"ellipsis": True}
        case torch.fx.Node():
            return {"ref": arg.name}
        case torch.dtype() | torch.device():
            return {type(arg).__name__: str(arg).removeprefix("torch.")}
    raise UnsupportedInput(f"a custom loss cannot have an argument of type {type(arg).__name__}")


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
        """Compute the loss and return the backward's datums, with negated derivatives as weights.

        Raises RequestFailed if the loss or a derivative is not finite.
        """
        rows = [output["logprobs"].to_torch().requires_grad_() for output in forward.loss_fn_outputs]
        with _loss_lock:
            loss, metrics = _checked_result(self._loss_fn(self._data, rows))
            loss.backward()
        self._metrics = {name: _number(value) for name, value in metrics.items()}
        self._metrics["loss:sum"] = _number(loss)
        # The loss may not depend on every datum.
        slopes = [self._torch.zeros_like(r) if r.grad is None else r.grad for r in rows]
        if not math.isfinite(self._metrics["loss:sum"]):
            raise RequestFailed(f"the custom loss is {_number(loss)}", "", "user")
        for index, slope in enumerate(slopes):
            if not slope.isfinite().all():
                raise RequestFailed(
                    f"the gradient of the custom loss is not finite at the log-probs of data[{index}]", "", "user"
                )
        return [
            _with_inputs(datum, datum.loss_fn_inputs[TARGETS], TensorData.of(-slope))
            for datum, slope in zip(self._data, slopes, strict=True)
        ]

    def finish(self, backward: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Merge the custom metrics into the backward's output, whose own loss becomes `surrogate_loss:sum`."""
        metrics = dict(backward.metrics)
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
        return backward.model_copy(update={"metrics": metrics | self._metrics})


def _checked_result(returned: Any) -> tuple[Any, Mapping[str, SupportsFloat]]:
    match returned:
        case (loss, metrics) if getattr(loss, "requires_grad", False):
            if loss.numel() != 1:
                shape = list(loss.shape)
                raise ValueError(f"a custom loss must be one number, not a tensor of shape {shape}: sum it")
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
        weights = TensorData(data=[0.0] * len(targets.data), dtype="float32", shape=targets.shape)
    return _with_inputs(datum, targets, weights)


def _with_inputs(datum: Datum, targets: TensorData, weights: TensorData) -> Datum:
    return Datum(datum.model_input, {TARGETS: targets, WEIGHTS: weights}, routed_experts=datum.routed_experts)


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
