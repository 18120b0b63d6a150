"""Matrices of experts in the form of PEFT's `target_parameters`, and back.

PEFT adapts the two parameters of an experts module, `gate_up_proj` and `down_proj`. It stacks the matrices of all
experts: A is `[experts * rank, in]`, expert slowest, and B `[out, rank * experts]`, expert fastest. Here gate and up
have matrices of their own. Together they are one adapter of twice the rank: A of gate above A of up, and B
block-diagonal. Alpha is doubled, so that the scale stays. A matrix that experts share is repeated for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from cotrain_workers.engine.spec import Layout, Pair, Target

GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: Names of the products at Tinker, whose matrices have three dimensions.
TINKER = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAME = re.compile(r"(?P<module>.+\.experts)(\.(?P<expert>\d+))?\.(?P<last>\w+)")


class NotShared(ValueError):
    """Error: the experts have different matrices where they must share one, or a block that must be zero is not."""


def parameter_names(module: str, parameter: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a parameter of experts; that of the first parameter is wrapped by the second."""
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
    """Return A `[experts, rank, in]` and B `[experts, out, rank]` of each product of a parameter, from the form of PEFT.

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


def uploaded(
    name: str, a: torch.Tensor, b: torch.Tensor, layout: Layout, *, in_halves: bool
) -> dict[tuple[str, int | None], Pair] | None:
    """Return uploaded matrices of experts by target and, of one expert alone, its number; None of another module.

    The matrices have the form of PEFT's parameters, of one module for each expert, or of Tinker.
    Raises ValueError for another shape, and NotShared.
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
