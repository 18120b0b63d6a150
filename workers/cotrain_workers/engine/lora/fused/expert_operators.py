"""Kernels of experts as torch ops in `torch.ops.cotrain`, with their fake implementations.

`expert_programs.py` defines the tables. `weights` are `[experts, out, in]`, and may be views of a larger weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cotrain_workers.engine.lora.fused.operators import (
    copies_by_tma,
    narrow_constants,
    no_result,
    product_constants,
    programs_module,
    programs_of,
    register,
)
from cotrain_workers.engine.lora.fused.tables import (
    EXPERT_PARTS,
    ROWS,
    SHRINK_ROWS,
    SUM_COLUMNS,
    TOKENS,
    expert_tiles,
    gradient_tiles,
    shrink_tiles,
)

FIELDS = 5  # of a tile
_SEGMENTS = 128  # compared at once
_TABLES = "Tensor tiles, Tensor bounds, Tensor entries, Tensor scales"
SCHEMAS = {
    "expert_tiles": "(Tensor bounds, int count, int rows) -> Tensor",
    # into low [P, columns]; modules may share one x
    "expert_shrink": "(Tensor[] xs, int modules, int side, Tensor bounds, Tensor entries, Tensor(a!) low) -> ()",
    # `gate`: 0 for one module, whose rows are multiplied with `shares`, or SILU, GELU or CLAMPED for two
    "expert_expand": "(Tensor x, Tensor[] weights, Tensor[] biases, int gate, Tensor low, Tensor shares, "
    f"{_TABLES}) -> Tensor[]",
    "expert_expand_back": "(Tensor[] gys, Tensor[] weights, Tensor[] gated, int gate, Tensor low, Tensor shares, "
    f"{_TABLES}) -> Tensor[]",
    "expert_gradient": "(Tensor low, Tensor[] xs, int modules, int side, Tensor? shares, Tensor owners, "
    "Tensor members, Tensor bounds, Tensor entries, Tensor scales) -> ()",
    "expert_sum": "(Tensor x, Tensor? shares, Tensor positions, int chosen) -> Tensor",
}


def most_tiles(rows: int, experts: int, height: int = ROWS) -> int:
    """Return the largest number of tiles of `height` rows, however `rows` are divided among experts."""
    return rows // height + min(rows, experts)


def find_tiles(bounds: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Return the tiles `[count + 1, 5]` of `rows` of all experts; `count` is the largest number of them."""
    tiles = _new_tiles(bounds, count, rows)
    experts = len(bounds) - 1
    _programs().find_tiles[(max(count, 1),)](
        bounds, tiles, count, experts, segments_of(bounds),
        EXPERTS=1 << (experts - 1).bit_length(), SEGMENTS=_SEGMENTS, BM=rows,
    )  # fmt: skip
    return tiles


def shrink(
    xs: Sequence[torch.Tensor], modules: int, side: int, bounds: torch.Tensor, entries: torch.Tensor, low: torch.Tensor
) -> None:
    """Write the LoRA columns of modules next to each other to `low` `[P, columns]`, in rows of adapters."""
    width, columns = xs[0].shape[1], low.shape[1]
    size = shrink_tiles(1, width, low.element_size())
    segments = segments_of(bounds)
    blocks = -(-columns // (modules * size.columns))
    grid = ((len(bounds) - 1) * segments, EXPERT_PARTS, blocks * modules)
    _programs().expert_shrink[grid](
        xs[0], xs[-1], low, bounds, entries, entries.stride(0), segments, width, columns,
        MODULES=modules, SIDE=side, PARTS=EXPERT_PARTS, BM=SHRINK_ROWS, **narrow_constants(size),
    )  # fmt: skip


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    tiles: torch.Tensor,
    bounds: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> list[torch.Tensor]:
    """Return `x W^T + b + scale * low B^T` of each module `[P, out]`, times the shares of the rows.

    With a gate, return two modules without shares, and their gated product.
    """
    ys = _new_outputs(x, weights, biases, gate)
    first, last = (biases[0], biases[-1]) if biases else (low, low)
    experts, width, inputs = weights[0].shape
    if tma := _copies_by_tma([x], weights):
        programs_module().give_memory(x.device)
    size = expert_tiles(width, x.element_size(), tma=tma)
    count, blocks = len(tiles) - 1, -(-width // size.columns)
    _programs().expert_expand[(programs_of(max(count * blocks, 1), x.device),)](
        x, weights[0], weights[-1], first, last, low, ys[0], *(ys[1:] or [ys[0], ys[0]]), shares, tiles, bounds, entries,
        entries.stride(0), scales, len(x), inputs, width, pitch(weights[0]), first.stride(0),
        low.shape[1], experts, segments_of(bounds), count, blocks,
        BIASED=bool(biases), GATE=gate, TMA=tma, **product_constants(size),
    )  # fmt: skip
    return ys


def expand_back(
    gys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gated: Sequence[torch.Tensor],
    gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    tiles: torch.Tensor,
    bounds: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradient of the modules' common input `[P, in]`.

    With a gate, return those of both `gated`, and the parts of the gradients of the shares `[P, blocks]`, fp32.
    """
    outs = _new_gradients(gys, weights, gated, gate, low)
    experts, width, inputs = weights[0].shape
    if tma := _copies_by_tma(gys, weights):
        programs_module().give_memory(low.device)
    size = expert_tiles(inputs, low.element_size(), tma=tma)
    count, blocks = len(tiles) - 1, -(-inputs // size.columns)
    gate_and_up = gated or [low, low]
    gx, gx1, slopes = outs if gate else (outs[0], outs[0], shares)
    # They are allocated without `tma`, on which the number of columns must not depend.
    assert not gate or slopes.shape[1] == blocks
    _programs().expert_expand_back[(programs_of(max(count * blocks, 1), low.device),)](
        gys[0], gys[-1], weights[0], weights[-1], low, *gate_and_up, gx, gx1, slopes, shares, tiles, bounds, entries,
        entries.stride(0), scales, len(low), inputs, width, pitch(weights[0]), low.shape[1], experts,
        segments_of(bounds), count, blocks,
        MODULES=len(weights), GATE=gate, TMA=tma, **product_constants(size),
    )  # fmt: skip
    return outs


def add_gradient(
    low: torch.Tensor,
    xs: Sequence[torch.Tensor],
    modules: int,
    side: int,
    shares: torch.Tensor | None,
    owners: torch.Tensor,
    members: torch.Tensor,
    bounds: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Add `scale * low^T x` to the gradients of adapters with a matrix for each expert on this side."""
    width, columns = xs[0].shape[1], low.shape[1]
    size = gradient_tiles(1, width, low.element_size())
    blocks = -(-columns // (modules * size.columns)) * modules * -(-width // size.depth)
    grid = (blocks, len(bounds) - 1, len(owners) - 1)
    _programs().expert_gradient[grid](
        low, xs[0], xs[-1], scales if shares is None else shares, owners, members, bounds, entries,
        entries.stride(0), segments_of(bounds), scales, width, columns,
        MODULES=modules, SIDE=side, SHARED=shares is not None, BT=TOKENS, **narrow_constants(size),
    )  # fmt: skip


def sum_rows(x: torch.Tensor, shares: torch.Tensor | None, positions: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the sums of the rows of each token `[T, width]`, each row times its share if there are shares."""
    out = _new_sums(x, shares, positions, chosen)
    width = x.shape[1]
    _programs().expert_sum[(len(out), -(-width // SUM_COLUMNS))](
        x, x if shares is None else shares, positions, out, width, chosen,
        SHARED=shares is not None, BN=SUM_COLUMNS,
    )  # fmt: skip
    return out


def segments_of(bounds: torch.Tensor) -> int:
    """Return the number of segments in a table of bounds."""
    return (bounds.shape[1] - 1) // 2


def pitch(weight: torch.Tensor) -> int:
    """Return the number of rows of memory from one expert to the next."""
    return weight.stride(0) // weight.shape[2]


def _copies_by_tma(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
    return copies_by_tma([*rows, *(each[0] for each in weights)])


def _programs() -> Any:
    from cotrain_workers.engine.lora.fused import expert_programs

    return expert_programs


def _new_tiles(bounds: torch.Tensor, count: int, _rows: int) -> torch.Tensor:
    return bounds.new_empty(count + 1, FIELDS)


def _new_outputs(
    x: torch.Tensor, weights: Sequence[torch.Tensor], _biases: Any, gate: int, *_: Any
) -> list[torch.Tensor]:
    return [x.new_empty(len(x), weights[0].shape[1]) for _ in range(3 if gate else 1)]


def _new_gradients(
    gys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], gated: Sequence[torch.Tensor], gate: int, *_: Any
) -> list[torch.Tensor]:
    rows, inputs = len(gys[0]), weights[0].shape[2]
    outs = [gys[0].new_empty(rows, inputs) for _ in range(len(gated) or 1)]
    if gate:
        blocks = -(-inputs // expert_tiles(inputs, gys[0].element_size()).columns)
        outs.append(gys[0].new_empty(rows, blocks, dtype=torch.float32))
    return outs


def _new_sums(x: torch.Tensor, _shares: Any, positions: torch.Tensor, chosen: int) -> torch.Tensor:
    return x.new_empty(len(positions) // chosen, x.shape[1])


register(
    SCHEMAS,
    (find_tiles, shrink, expand, expand_back, add_gradient, sum_rows),
    (_new_tiles, no_result, _new_outputs, _new_gradients, no_result, _new_sums),
)
