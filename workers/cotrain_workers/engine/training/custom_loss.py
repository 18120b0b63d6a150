"""Custom losses: graphs of allowed operations from tenants, rebuilt and differentiated here.

A graph computes the loss of one datum from its log-probabilities and inputs. It runs on the CPU, with the bits of the
client that would run it. Sizes are bounded before each operation. A graph that fails has a loss of NaN, so its request
fails alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cotrain_workers.engine.device import is_out_of_memory
from cotrain_workers.engine.ops import Datum, GraphNode, LossGraph

#: Maximum elements of all values of a graph, for one datum, and for each of its tokens and of the graph's nodes. The
#: token budget counts tokens and nodes, so the time of a graph is proportional to its cost there.
MAX_ELEMENTS = 1 << 24
ELEMENTS_EACH = 1 << 12
_LARGEST_INT = 1 << 62

_BOTH = "relu softmax log_softmax"
_BINARY = "add sub mul pow lt le gt ge eq ne"
_VALUES = """abs neg sign exp expm1 log log1p log2 sqrt rsqrt square sigmoid tanh relu erf floor ceil round clamp clip
 maximum minimum where logical_and logical_or logical_not isfinite isnan nan_to_num masked_fill sum mean prod std var
 amax amin max min any all argmax argmin logsumexp softmax log_softmax cumsum cumprod logcumsumexp norm dot flip roll
 diff sort argsort topk gather index_select reshape squeeze unsqueeze transpose flatten broadcast_to tril triu numel"""
_OF_NUMBERS = f"{_BINARY} truediv floordiv mod abs neg pos and_ or_ xor invert".split()


def _of_numbers(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python operator that accepts tensors and numbers only: a product of a list could fill the memory."""

    def checked(*args: Any) -> Any:
        if not all(isinstance(arg, torch.Tensor | int | float) for arg in args):
            raise TypeError("its arguments must be tensors or numbers")
        if operation is operator.pow and not any(isinstance(arg, torch.Tensor) for arg in args):
            return math.pow(*args)
        return operation(*args)

    return checked


def _attribute(value: torch.Tensor, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is an attribute of tensors only")
    return getattr(value, name)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "getattr": _attribute,
    "operator.getitem": operator.getitem,
    **{f"operator.{name}": _of_numbers(getattr(operator, name)) for name in _OF_NUMBERS},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in f"""{_BINARY} div {_VALUES} logaddexp lerp outer cat stack zeros ones full zeros_like
        ones_like full_like arange""".split()
    },
    **{
        f"torch.nn.functional.{name}": getattr(torch.nn.functional, name)
        for name in f"{_BOTH} silu elu leaky_relu mse_loss l1_loss smooth_l1_loss huber_loss softsign".split()
    },
    "torch._C._nn.log_sigmoid": torch._C._nn.log_sigmoid,
    "torch._C._nn.softplus": torch._C._nn.softplus,
    "torch._C._nn.gelu": torch._C._nn.gelu,
    "torch._C._special.special_expit": torch.special.expit,
}
METHODS = frozenset(
    f"""{_BINARY} div {_VALUES} clamp_min clamp_max view permute t expand expand_as detach clone contiguous float
    double long bool to type_as size dim new_zeros new_ones narrow select""".split()
)
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


#: Operations whose sizes are numbers, sums or those of an index; most others broadcast.
_FACTORIES = frozenset({"zeros", "ones", "full", "arange", "new_zeros", "new_ones"})
_LOOK_UPS = frozenset({"getitem", "index_select"})
_JOINS = frozenset({"cat", "stack"})


class GraphFailed(Exception):
    """A node of a graph cannot be computed; the message names it."""


def run_graph(
    graph: LossGraph, logprobs: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one datum, a scalar, and its metrics. Raises GraphFailed."""
    given = dict(zip((name for name, _ in graph.inputs), (logprobs, *inputs), strict=True))
    values: dict[str, Any] = {}
    left = limit = min(MAX_ELEMENTS, ELEMENTS_EACH * (len(graph.nodes) + logprobs.numel()))
    too_large = ValueError(f"its values and those before it have more than {limit} elements")
    for node in graph.nodes:
        try:
            args = [_argument(arg, values) for arg in node.args]
            kwargs = {name: _argument(arg, values) for name, arg in node.kwargs.items()}
            if _bound(node, [*args, *kwargs.values()]) > left:
                raise too_large
            value = given[node.target] if node.op == "placeholder" else _call(node, args, kwargs)
            left -= _elements(value)
            if left < 0:
                raise too_large
        except (
            ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
        ) as error:  # fmt: skip
            if is_out_of_memory(error):
                raise
            raise GraphFailed(f"node {node.name!r} ({node.target}): {_first_line(error)}") from error
        values[node.name] = value
    loss, _ = values[graph.nodes[-1].name]
    metrics = {name: values[node] for name, node in graph.metrics.items()}
    for name, value in {"the loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.ndim:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise GraphFailed(f"{name} must be a tensor without axes, not {shape}")
    return loss, metrics


def loss_of_datums(graph: LossGraph, datums: Sequence[Datum]) -> Callable[[torch.Tensor, Any, Any], torch.Tensor]:
    """Return a loss function of log-probabilities `[n, K]` of these datums; it returns one loss per datum.

    A datum that fails has a loss of NaN, so that its request fails alone.
    """

    def compute(logprobs: torch.Tensor, _inputs: Any, _config: Any) -> torch.Tensor:
        on_host, losses, start = logprobs.cpu(), [], 0
        for datum in datums:
            rows = on_host[start : start + len(datum.tokens)]
            start += len(datum.tokens)
            try:
                losses.append(_with_slope(rows, *loss_and_slope(graph, datum, rows)))
            except GraphFailed:
                losses.append(rows.sum() * math.nan)
        return torch.stack(losses)

    return compute


def loss_and_slope(graph: LossGraph, datum: Datum, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss of a datum and its derivative by `rows`, None if they need none. Raises GraphFailed."""
    if not rows.requires_grad:
        return run_graph(graph, *_arguments(graph, datum, rows))[0], None
    leaf = rows.detach().clone().requires_grad_()
    loss, _ = run_graph(graph, *_arguments(graph, datum, leaf))
    if not loss.requires_grad:
        raise GraphFailed("the loss does not depend on logprobs")
    try:
        (slope,) = torch.autograd.grad(loss, leaf)
    except (NotImplementedError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise GraphFailed(f"the loss has no derivative: {_first_line(error)}") from error
    return loss.detach(), slope


def _with_slope(rows: torch.Tensor, loss: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    """Return the loss with this derivative by `rows`. An error in a derivative would otherwise fail other requests."""
    return loss if slope is None else loss + ((rows - rows.detach()) * slope).sum()


def custom_metrics(graph: LossGraph, datums: Sequence[Datum], found: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the metrics of a pass: the sum or the mean over its datums, by their suffix."""
    if not graph.metrics or not datums:
        return {}
    sums: dict[str, float] = {}
    with torch.no_grad():
        for datum, now in zip(datums, found, strict=True):
            _, metrics = run_graph(graph, *_arguments(graph, datum, torch.from_numpy(now)))
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return {name: s / len(datums) if name.endswith(":mean") else s for name, s in sums.items()}


def broken_datum(graph: LossGraph, datums: Sequence[Datum], found: Sequence[np.ndarray], *, needs_grad: bool) -> str:
    """Return a sentence on the first datum whose loss fails or is not finite; "" if there is none."""
    with torch.enable_grad():
        for number, (datum, now) in enumerate(zip(datums, found, strict=True)):
            rows = torch.from_numpy(now).requires_grad_(needs_grad)
            try:
                loss, _ = loss_and_slope(graph, datum, rows)
            except GraphFailed as failed:
                return f" data[{number}]: {failed}."
            if not torch.isfinite(loss):
                return f" The loss of data[{number}] is {float(loss)}."
    return ""


def _arguments(graph: LossGraph, datum: Datum, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return log-probabilities `[T]` or `[T, K]` and the inputs of a datum, in the shapes that the graph declares."""
    inputs = []
    for name, rank in graph.inputs[1:]:
        array = datum.inputs[name]
        value = torch.from_numpy(array).reshape(_shape(array.shape, rank))
        inputs.append(value.to(rows.dtype) if value.is_floating_point() else value)
    return rows.reshape(_shape(datum.shape, graph.inputs[0][1])), inputs


def _shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return shape if rank else ()


def _call(node: GraphNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of a node that calls something, or of the output."""
    match node.op:
        case "output":
            return args[0]
        case "call_function":
            return FUNCTIONS[node.target](*args, **kwargs)
        case "call_method" if node.target in METHODS and isinstance(args[0], torch.Tensor):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
    raise TypeError("it is not allowed")


def _bound(node: GraphNode, args: Sequence[Any]) -> float:
    """Return a bound of the elements that a node writes, from its arguments."""
    name = node.target.rpartition(".")[2]
    if not node.op.startswith("call"):
        return 0
    if name in _FACTORIES:
        numbers = _numbers(args[1:] if name.startswith("new_") else args)
        if name == "arange":
            return sum(numbers) / min([1, *numbers])
        return math.prod(max(1, each) for each in numbers)
    tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
    if name == "outer":
        return math.prod(each.numel() for each in tensors)
    if name in _JOINS:
        return sum(each.numel() for each in tensors)
    if name in _LOOK_UPS and tensors:
        source = tensors[0].numel() / max(1, min(tensors[0].shape, default=1))
        return source * _broadcast(tensors[1:])
    return _broadcast(tensors)


def _numbers(args: Iterable[Any]) -> list[float]:
    """Return the absolute values of all numbers that are not zero; torch also takes a tensor of one element for one."""
    numbers = (
        abs(each.item() if isinstance(each, torch.Tensor) else each)
        for each in _flat(args)
        if isinstance(each, int | float) or (isinstance(each, torch.Tensor) and each.numel() == 1)
    )
    return [number for number in numbers if number]


def _broadcast(tensors: Sequence[torch.Tensor]) -> int:
    axes = max((each.ndim for each in tensors), default=0)
    sizes = [each.shape[::-1] for each in tensors]
    return math.prod(max(size[at] if at < len(size) else 1 for size in sizes) for at in range(axes))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{text:.200}"


def _argument(arg: Any, values: Mapping[str, Any]) -> Any:
    match arg:
        case list():
            return [_argument(each, values) for each in arg]
        case {"ref": name}:
            return values[name]
        case {"tuple": parts}:
            return tuple(_argument(each, values) for each in parts)
        case {"dict": entries}:
            return {name: _argument(each, values) for name, each in entries.items()}
        case {"slice": parts}:
            return slice(*(_argument(each, values) for each in parts))
        case {"ellipsis": _}:
            return ...
        case {"float": text}:
            return float(text)
        case {"dtype": name}:
            return _DTYPES[name]
        case {"device": _}:
            return None
    return arg


def _elements(value: Any) -> int:
    """Return the number of elements of a value. Raises TypeError for a value that no node may have."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, tuple | list | dict):
        return sum(_elements(each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise TypeError("the number is too large")
    if not isinstance(value, int | float | torch.dtype):
        raise TypeError(f"it returns a {type(value).__name__}")
    return 1
