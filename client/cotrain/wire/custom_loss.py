"""Custom losses as data: a traced graph of allowed operations, its check, and its encoding as a `loss_id`.

The format is that of the hosted SDK. A `loss_id` contains the whole loss, so a server stores none, and an op of the log can be
repeated without its session.
"""

import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cotrain.errors import UnsupportedInput
from cotrain.wire.model import Name, WireModel

__all__ = [
    "CreateCustomLossRequest", "CreateCustomLossResponse", "CustomLossGraph", "CustomLossInput",
    "CustomLossInputRank", "CustomLossNode",
]  # fmt: skip

LOSS_ID = "loss_id"
LOGPROBS = "logprobs"
PREFIX = "loss-"
MAX_NODES = 256
MAX_INPUTS = 16
MAX_METRICS = 32
MAX_NODE_RUNS = 1 << 15
"""Maximum nodes of a graph times datums of one request: about a second of a worker."""
MAX_ID = 16_384
"""Maximum characters of a `loss_id`; a graph of 256 nodes has about 4,000."""
_MAX_JSON = 1 << 18
_MAX_DEPTH = 6

# Names that several of the namespaces below have.
_BINARY = "add sub mul pow lt le gt ge eq ne"
_VALUES = """abs neg sign exp expm1 log log1p log2 sqrt rsqrt square sigmoid tanh relu erf floor ceil round clamp clip
 maximum minimum where logical_and logical_or logical_not isfinite isnan nan_to_num masked_fill sum mean prod std var
 amax amin max min any all argmax argmin logsumexp softmax log_softmax cumsum cumprod logcumsumexp norm dot flip roll
 diff sort argsort topk gather index_select reshape squeeze unsqueeze transpose flatten broadcast_to tril triu numel"""
FUNCTIONS = frozenset((
    "getattr",
    *(f"operator.{name}" for name in
      f"{_BINARY} truediv floordiv mod abs neg pos and_ or_ xor invert getitem".split()),
    *(f"torch.{name}" for name in
      f"""{_BINARY} div {_VALUES} logaddexp lerp outer cat stack zeros ones full zeros_like ones_like full_like
      arange""".split()),
    *(f"torch.nn.functional.{name}" for name in
      ["relu", "softmax", "log_softmax", "silu", "elu", "leaky_relu", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "softsign"]),
    "torch._C._nn.log_sigmoid", "torch._C._nn.softplus", "torch._C._nn.gelu", "torch._C._special.special_expit",
))  # fmt: skip
"""Allowed functions, by the qualified names that `torch.fx` gives them."""
METHODS = frozenset(
    f"""{_BINARY} div {_VALUES} clamp_min clamp_max view permute t expand expand_as detach clone contiguous float
    double long bool to type_as size dim new_zeros new_ones narrow select""".split()
)
"""Allowed methods of tensors."""
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "T"})
DTYPES = frozenset({"float32", "float64", "int64", "bool"})

_TEXTS = frozenset({"approximate", "p", "reduction", "rounding_mode"})
"""Arguments that are texts. A text could also name a device."""
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_HINTS = {
    "operator.matmul": "use (a * b).sum()",
    "torch.matmul": "use (a * b).sum()",
    "item": "keep every value a tensor",
    "tolist": "keep every value a tensor",
}

CustomLossInputRank = Literal[0, 1, 2]
"""Number of axes: 0 is a scalar, 1 is `[T]`, 2 is `[T, K]`."""
_InputName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")]
_NodeName = Annotated[str, Field(min_length=1, max_length=128)]


class CustomLossInput(WireModel):
    """An argument of the loss: `logprobs`, or a key of `loss_fn_inputs`."""

    name: _InputName
    rank: CustomLossInputRank


class CustomLossNode(WireModel):  # type: ignore[no-redef]  # mypy takes `kwargs` for its own
    """One step of the graph, as `torch.fx` records it.

    Arguments are JSON values, or objects of one key: `ref` for an earlier node, `tuple`, `dict`, `slice`, `ellipsis`,
    `float` for inf and NaN, and `dtype`, `device`.
    """

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: _NodeName
    target: _NodeName
    args: list[Any] = Field(default=[])
    kwargs: dict[str, Any] = Field(default={})


class CustomLossGraph(WireModel):
    """Nodes in their order: placeholders, calls, and one output."""

    format: Literal[1] = 1
    nodes: Annotated[list[CustomLossNode], Field(min_length=1, max_length=MAX_NODES)]


class CustomLoss(WireModel):
    """A loss: its arguments in order, `logprobs` first, and its graph."""

    inputs: Annotated[list[CustomLossInput], Field(min_length=1, max_length=MAX_INPUTS)]
    graph: CustomLossGraph


class CreateCustomLossRequest(CustomLoss):
    """POST create_custom_loss."""

    session_id: Name
    custom_loss_seq_id: Annotated[int, Field(ge=0)]
    name: Name
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(WireModel):
    """Result: the id for `loss_fn_config` of passes with loss `custom`."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


def encode_loss(loss: CustomLoss) -> str:
    """Return the `loss_id` of a checked loss. Raises UnsupportedInput if it is too long."""
    plain = CustomLoss(inputs=loss.inputs, graph=loss.graph).model_dump_json().encode()
    loss_id = PREFIX + urlsafe_b64encode(zlib.compress(plain, 9)).decode()
    if len(plain) > _MAX_JSON or len(loss_id) > MAX_ID:
        raise UnsupportedInput(
            f"graph is too large: its loss_id has {len(loss_id)} characters, at most {MAX_ID} are allowed."
        )
    return loss_id


def decode_loss(loss_id: str) -> CustomLoss:
    """Return the checked loss of a `loss_id`. Raises UnsupportedInput."""
    try:
        compressed = urlsafe_b64decode(loss_id[:MAX_ID].removeprefix(PREFIX))
        loss = CustomLoss.model_validate_json(zlib.decompressobj().decompress(compressed, _MAX_JSON))
    except (ValueError, zlib.error):
        raise UnsupportedInput("loss_fn_config.loss_id is not an id that create_custom_loss returned.") from None
    check_loss(loss)
    return loss


def check_loss(loss: CustomLoss) -> None:
    """Check that a graph has the required form and only allowed operations. Raises UnsupportedInput, which names the node."""
    names = [each.name for each in loss.inputs]
    if names[0] != LOGPROBS or loss.inputs[0].rank == 0:
        raise UnsupportedInput("inputs[0] must be logprobs, with rank 1 or 2.")
    nodes = loss.graph.nodes
    found = [node.target for node in nodes if node.op == "placeholder"]
    if found != names or len(set(names)) < len(names):
        raise UnsupportedInput(f"graph has the placeholders {found}; inputs has {names}.")
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise UnsupportedInput("graph must end in its only output node.")
    earlier: set[str] = set()
    for node in nodes:
        _check_node(node, earlier)
        if node.name in earlier:
            raise UnsupportedInput(f"graph has two nodes {node.name!r}.")
        earlier.add(node.name)
    loss_and_metrics(loss)


def loss_and_metrics(loss: CustomLoss) -> tuple[str, dict[str, str]]:
    """Return the node of the loss, and the node of each metric. Raises UnsupportedInput for another output."""
    args = loss.graph.nodes[-1].args
    match args:
        case [{"tuple": [{"ref": value}, metrics]}] | [[{"ref": value}, metrics]]:
            pass
        case _:
            raise UnsupportedInput("a custom loss must return (loss, metrics), both made of tensors.")
    entries = metrics.get("dict", metrics) if isinstance(metrics, dict) else None
    if not isinstance(entries, dict) or len(entries) > MAX_METRICS:
        raise UnsupportedInput(f"metrics must be a dict of at most {MAX_METRICS} tensors.")
    for name, metric in entries.items():
        if not _METRIC.fullmatch(name):
            raise UnsupportedInput(
                f"metric {name!r:.80} must be named custom/<name>:sum or custom/<name>:mean in lowercase."
            )
        if not isinstance(metric, dict) or metric.keys() != {"ref"}:
            raise UnsupportedInput(f"metric {name} must be a tensor.")
    return value, {name: metric["ref"] for name, metric in entries.items()}


def _check_node(node: CustomLossNode, earlier: set[str]) -> None:
    where = f"graph node {node.name!r}"
    match node.op:
        case "placeholder" if node.args or node.kwargs:
            raise UnsupportedInput(f"{where}: an input has no default.")
        case "call_function" if node.target not in FUNCTIONS:
            raise _not_allowed(where, node.target)
        case "call_method" if node.target not in METHODS:
            raise _not_allowed(where, f"Tensor.{node.target}", _HINTS.get(node.target))
        case "get_attr":
            raise UnsupportedInput(
                f"{where}: a custom loss reads logprobs and its inputs only. Send {node.target!r} in loss_fn_inputs."
            )
        case "call_module":
            raise UnsupportedInput(f"{where}: modules are not allowed. Use torch.nn.functional.")
        case "call_function" if node.target == "getattr" and not _is_attribute(node):
            raise UnsupportedInput(f"{where}: allowed attributes are {', '.join(sorted(ATTRIBUTES))}.")
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        raise UnsupportedInput(f"{where}: {node.target} must not change its arguments.")
    texts = [value for name, value in node.kwargs.items() if name in _TEXTS]
    texts += node.args[1:2] if node.target == "getattr" else []
    for leaf in _leaves(where, [node.args, list(node.kwargs.values())]):
        match leaf:
            case str() if leaf not in texts:
                raise UnsupportedInput(f"{where}: {leaf!r:.80} is no argument of a custom loss.")
            case {"ref": name} if name not in earlier:
                raise UnsupportedInput(f"{where}: {name!r:.80} is no earlier node.")
            case {"dtype": name} if name not in DTYPES:
                raise UnsupportedInput(f"{where}: dtype {name!r:.80} is not one of {', '.join(sorted(DTYPES))}.")
            case {"device": name} if name != "cpu":
                raise UnsupportedInput(f"{where}: device {name!r:.80}: a custom loss runs where the server decides.")


def _not_allowed(where: str, target: str, hint: str | None = None) -> UnsupportedInput:
    hint = hint or _HINTS.get(target) or "docs/guide/custom-losses.md lists the allowed operations"
    return UnsupportedInput(f"{where}: {target} is not allowed in a custom loss; {hint}.")


def _is_attribute(node: CustomLossNode) -> bool:
    match node.args:
        case [{"ref": _}, name]:
            return name in ATTRIBUTES
    return False


def _leaves(where: str, value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield all encoded values without parts. Raises UnsupportedInput for an unknown encoding."""
    if depth > _MAX_DEPTH:
        raise UnsupportedInput(f"{where}: its arguments are nested too deeply.")
    parts: Sequence[Any] = ()
    if isinstance(value, list):
        parts = value
    elif isinstance(value, dict):
        match next(iter(value.items())) if len(value) == 1 else None:
            case ("tuple", [*parts]) | ("slice", [_, _, _] as parts):
                pass
            case ("dict", dict() as entries):
                parts = list(entries.values())
            case ("ref" | "dtype" | "device", str()) | ("ellipsis", True):
                yield value
            case ("float", "inf" | "-inf" | "nan"):
                yield value
            case _:
                raise UnsupportedInput(f"{where}: {value!s:.80} is no known argument.")
    else:
        yield value
    for part in parts:
        yield from _leaves(where, part, depth + 1)
