"""Import of adapters that PEFT wrote, and matrices of experts in the form of its `target_parameters`, and back.

PEFT adapts the two parameters of an experts module, `gate_up_proj` and `down_proj`. It stacks the matrices of all
experts: A is `[experts * rank, in]`, expert slowest, and B `[out, rank * experts]`, expert fastest. Here gate and up
have matrices of their own. Together they are one adapter of twice the rank: A of gate above A of up, and B
block-diagonal. Alpha is doubled, so that the scale stays. A matrix that experts share is repeated for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.ops import HostWeights, PeftAdapter, PeftModule
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target

LayoutOf = Callable[[AdapterSpec], Layout]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ROWS = 1024
#: Weights of the base model that PEFT saves with an adapter of lm_head, or where it is asked to.
_BASE_WEIGHT = re.compile(
    r"base_model\.model\.(?P<module>lm_head|model\.(language_model\.)?embed_tokens)(\.base_layer)?\.weight"
)
GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: Names of the products at Tinker, whose matrices have three dimensions.
TINKER = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAME = re.compile(r"(?P<module>.+\.experts)(\.(?P<expert>\d+))?\.(?P<last>\w+)")


class NotShared(ValueError):
    """Error: the experts have different matrices where they must share one, or a block that must be zero is not."""


class ImportRefused(Exception):
    """Error: this adapter cannot be imported. The message is a sentence for its tenant."""


def read_import(
    adapter: PeftAdapter,
    layout_of: LayoutOf,
    max_rank: int,
    base_weights: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> HostWeights:
    """Read the matrices of an adapter that PEFT wrote into an arena of ours.

    The result is the same function, in this server's layout and scale. Every module gets the run's one rank, and
    `alpha` 32; B absorbs the ratio of the scales. Missing rows and modules start as in a fresh adapter: A random, B
    zero. So they add nothing now and can be trained later.

    `base_weights`, by module, are those that an adapter may hold a copy of.

    Raises:
        ImportRefused: it does not fit this base model, or has values that are not finite.
    """
    try:
        tensors = load_tensors(adapter.tensors)
    except SafetensorError as unreadable:
        raise ImportRefused("The uploaded adapter cannot be read.") from unreadable
    spec = adapter.spec
    if not 1 <= spec.rank <= max_rank:
        raise ImportRefused(f"The adapter has rank {spec.rank}; between 1 and {max_rank} is served.")
    layout = layout_of(spec)
    flat = initial_weights(spec, layout)
    pair_by_name = layout.views(flat)
    for module in adapter.modules:
        a, b = (_take(tensors, name) for name in (module.a, module.b))
        if _fill_experts(pair_by_name, a, b, module, layout, spec):
            continue
        target = layout.target_by_name.get(module.name)
        if target is None or target.experts:
            raise ImportRefused(f"{module.a}: the base model has no module {module.name} to adapt.")
        _check_shapes(module, a, b, target, spec.rank)
        _fill(pair_by_name[module.name], a, b, module, spec.scale)
    for name in list(tensors):
        if saved_along := _BASE_WEIGHT.fullmatch(name):
            _check_same(name, tensors.pop(name), base_weights.get(saved_along["module"]))
    if tensors:
        raise ImportRefused(f"{min(tensors)}: not a LoRA matrix of a module that can be adapted.")
    return HostWeights(spec, flat)


def _fill_experts(
    pair_by_name: Mapping[str, Pair],
    a: torch.Tensor,
    b: torch.Tensor,
    module: PeftModule,
    layout: Layout,
    spec: AdapterSpec,
) -> bool:
    """Write matrices of experts over those of a fresh adapter; return False for another module."""
    try:
        found = _pairs_of_experts(module.name, a, b, layout, in_halves=module.in_halves)
        for (name, expert), own in (found or {}).items():
            pair = pair_by_name[name]
            if expert is not None:
                _fill(Pair(pair.a[expert], pair.b[expert]), own.a, own.b, module, spec.scale)
                continue
            a, b = shared(own.a, len(pair.a)), shared(own.b, len(pair.b))
            _fill(pair, a, b, module, spec.scale)
    except NotShared as different:
        raise ImportRefused(
            f"{module.a} cannot be imported: the file says that experts share a matrix, but {different}."
        ) from different
    except ValueError as unfit:
        raise ImportRefused(f"{module.a} and {module.b} have {unfit}.") from unfit
    return found is not None


def _check_same(name: str, saved: torch.Tensor, own: torch.Tensor | None) -> None:
    """Raise ImportRefused unless a weight of the base model is the one served here, in either precision."""
    if own is not None and own.shape == saved.shape and saved.is_floating_point():
        # A few rows at a time: the device may have no room for a second vocabulary.
        rows = zip(saved.split(_ROWS), own.split(_ROWS), strict=True)
        if all(_are_same(some.to(theirs.device), theirs) for some, theirs in rows):
            return
    raise ImportRefused(
        f"{name} cannot be imported: these are weights of the base model, and other than those served here. "
        "Save the adapter with save_embedding_layers=False and without modules_to_save."
    )


def _are_same(saved: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.equal(saved.to(own.dtype), own) or torch.equal(own.to(saved.dtype), saved)


def _take(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ImportRefused(f"{name} is missing.")
    if tensor.dtype not in _DTYPES:
        raise ImportRefused(f"{name} is {tensor.dtype}; F64, F32, F16 and BF16 can be imported.")
    return tensor.float()


def _check_shapes(module: PeftModule, a: torch.Tensor, b: torch.Tensor, target: Target, max_rank: int) -> None:
    rank = a.shape[0] if a.ndim == 2 else 0
    if not 1 <= rank <= max_rank:
        raise ImportRefused(f"{module.a} has shape {list(a.shape)}: no rank of 1 to {max_rank}.")
    for name, tensor, shape in ((module.a, a, [rank, target.inputs]), (module.b, b, [target.outputs, rank])):
        if list(tensor.shape) != shape:
            raise ImportRefused(f"{name} has shape {list(tensor.shape)}; this base model needs {shape}.")


def _fill(pair: Pair, a: torch.Tensor, b: torch.Tensor, module: PeftModule, run_scale: float) -> None:
    """Write a module's matrices over the first `r` of the run's ranks.

    `pair.a` is `[rank, inputs]`, `pair.b` `[outputs, rank]`; `a` and `b` have `r <= rank`. The matrices of experts have
    one more dimension in front.
    """
    factor = module.scale / run_scale
    if factor != 1.0:  # 1.0 for own exports, which are restored to the bit
        b = (b.double() * factor).float()
    for name, matrix in ((module.a, a), (module.b, b)):
        if not torch.isfinite(matrix).all():
            raise ImportRefused(f"{name} holds numbers that are not finite, or too large.")
    rank = a.shape[-2]
    pair.a[..., :rank, :], pair.b[..., :rank] = a, b


def parameter_names(module: str, parameter: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a parameter of experts; the first parameter is wrapped by the second."""
    inner = ".base_layer" if parameter == GATE_UP else ""
    return tuple(f"base_model.model.{module}{inner}.lora_{letter}.weight" for letter in "AB")  # type: ignore[return-value]


def parameter_shapes(parameter: str, rank: int, target: Target) -> list[torch.Size]:
    """Return the shapes of A and B of a parameter; `target` is that of the gate."""
    inner, width = target.outputs, target.inputs
    if parameter == DOWN:
        return [torch.Size((target.experts * rank, inner)), torch.Size((width, target.experts * rank))]
    rows = target.experts * 2 * rank
    return [torch.Size((rows, width)), torch.Size((2 * inner, rows))]


def stacked(
    layout: Layout, views: Mapping[str, Pair]
) -> Iterator[tuple[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the names and the matrices A and B of each parameter of experts."""
    for module, target in layout.gate_by_experts.items():
        gate, up, down = (views[f"{module}.{name}_proj"] for name in ("gate", "up", "down"))
        yield parameter_names(module, GATE_UP), gate_up(gate, up, target)
        yield (parameter_names(module, DOWN), (stacked_a(down.a, target.experts), stacked_b(down.b, target.experts)))


def gate_up(gate: Pair, up: Pair, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of gate and up as one adapter of twice the rank."""
    rank, experts = gate.a.shape[1], target.experts
    b = gate.b.new_zeros(experts, 2 * target.outputs, 2 * rank)
    for own, half, pair in zip(halves(target), (slice(rank), slice(rank, None)), (gate, up), strict=True):
        b[:, own, half] = pair.b
    return stacked_a(torch.cat([gate.a, up.a], dim=1), experts), stacked_b(b, experts)


def halves(target: Target) -> tuple[slice, slice]:
    """Return the rows of gate and of up in their common weight."""
    if target.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(target.outputs), slice(target.outputs, None)


def stacked_a(a: torch.Tensor, experts: int) -> torch.Tensor:
    """Return A `[1 or experts, rank, in]` as `[experts * rank, in]`."""
    return a.expand(experts, -1, -1).reshape(-1, a.shape[2])


def stacked_b(b: torch.Tensor, experts: int) -> torch.Tensor:
    """Return B `[1 or experts, out, rank]` as `[out, rank * experts]`."""
    return b.expand(experts, -1, -1).permute(1, 2, 0).reshape(b.shape[1], -1)


def of_parameter(
    parameter: str, a: torch.Tensor, b: torch.Tensor, target: Target, *, in_halves: bool
) -> dict[str, Pair]:
    """Return A `[experts, rank, in]` and B `[experts, out, rank]` of each product of a parameter, from the form of
    PEFT.

    If gate and up are `in_halves`, each has half of the rank. Otherwise each has the whole rank, with the same A.
    `target` is that of the gate. Raises NotShared.
    """
    a = a.reshape(target.experts, -1, a.shape[1])
    b = b.reshape(len(b), -1, target.experts).permute(2, 0, 1)
    if parameter == DOWN:
        return {DOWN: Pair(a, b)}
    rank, (of_gate, of_up) = a.shape[1], halves(target)
    if not in_halves:
        return {"gate_proj": Pair(a, b[:, of_gate]), "up_proj": Pair(a, b[:, of_up])}
    first, second = slice(rank // 2), slice(rank // 2, None)
    if b[:, of_gate, second].any() or b[:, of_up, first].any():
        raise NotShared("gate and up have no ranks of their own")
    return {"gate_proj": Pair(a[:, first], b[:, of_gate, first]), "up_proj": Pair(a[:, second], b[:, of_up, second])}


def shared(matrices: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first of equal matrices if `count` is 1, else all. Raises NotShared."""
    if count > 1 or len(matrices) == 1:
        return matrices
    bits = matrices.contiguous().view(torch.int32)  # equal bits, NaN included
    if not torch.equal(bits, bits[:1].expand_as(bits)):
        raise NotShared("the experts have different matrices")
    return matrices[:1]


def _pairs_of_experts(
    name: str, a: torch.Tensor, b: torch.Tensor, layout: Layout, *, in_halves: bool
) -> dict[tuple[str, int | None], Pair] | None:
    """Return uploaded matrices of experts, by target and number of the expert. The number is None for all experts.

    The matrices have the form of PEFT's parameters, of one module for each expert, or of Tinker. Return None if `name`
    is no module of experts. Raises ValueError for another shape, and NotShared.
    """
    match = _NAME.fullmatch(name)
    module = layout.gate_by_experts.get(match["module"]) if match else None
    if match is None or module is None:
        return None
    path, last, experts = match["module"], TINKER.get(match["last"], match["last"]), module.experts
    target = layout.target_by_name.get(f"{path}.{last}")
    if match["expert"]:
        number = int(match["expert"])
        if target is None or number >= experts:
            return None
        if (target.experts_a, target.experts_b) != (experts, experts):
            raise NotShared("the experts have different matrices")
        _check(a, b, target, layout.rank, ())
        return {(target.name, number): Pair(a, b)}
    if a.ndim == 3 and target is not None:
        counts = tuple(each if each in (1, experts) else experts for each in (len(a), len(b)))
        _check(a, b, target, layout.rank, counts)
        return {(target.name, None): Pair(a, b)}
    if last not in (GATE_UP, DOWN):
        return None
    rank = max(1, len(a) // experts)
    form = parameter_shapes(last, 1, module)
    inputs, outputs = form[0][1], form[1][0]
    if a.shape != (experts * rank, inputs) or b.shape != (outputs, experts * rank):
        raise ValueError(
            f"shapes {list(a.shape)} and {list(b.shape)}; this base model needs [{experts} * rank, {inputs}] "
            f"and [{outputs}, rank * {experts}]"
        )
    if in_halves and last == GATE_UP and rank % 2:
        raise ValueError(f"rank {rank}, which gate and up cannot share")
    if rank // (2 if in_halves and last == GATE_UP else 1) > layout.rank:
        raise ValueError(f"rank {rank}, which is not that of the configuration")
    found = of_parameter(last, a, b, module, in_halves=in_halves)
    return {(f"{path}.{each}", None): pair for each, pair in found.items()}


def _check(a: torch.Tensor, b: torch.Tensor, target: Target, largest: int, counts: tuple[int, ...]) -> None:
    """Raise ValueError unless the matrices have the shapes of a product, with one rank of 1 to `largest`."""
    rank = a.shape[-2] if a.ndim >= 2 else 0
    expected = [[*counts[:1], rank, target.inputs], [*counts[1:], target.outputs, rank]]
    if [list(a.shape), list(b.shape)] != expected or not 1 <= rank <= largest:
        raise ValueError(
            f"shapes {list(a.shape)} and {list(b.shape)}; this base model needs {expected[0]} and {expected[1]}"
        )
