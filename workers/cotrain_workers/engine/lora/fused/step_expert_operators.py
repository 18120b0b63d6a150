"""Kernels of the experts of a decoder step as torch ops in `torch.ops.cotrain`, with their fake implementations.

`step_expert_programs.py` defines the tables. Tile sizes depend on the model, on the type of its values, and on the kind of a row:
generated, or of a prompt. No row of a neighbour changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cotrain_workers.engine.lora.fused.expert_operators import pitch
from cotrain_workers.engine.lora.fused.operators import no_result, programs_module, register
from cotrain_workers.engine.lora.fused.tables import RANK, Tiles, shrink_tiles
from cotrain_workers.engine.spec import aligned

#: Rows of a tile of generated tokens, of which an expert has few, and of prompts.
ROW_ROWS, PROMPT_ROWS = 16, 64
RUN = 16  # rows of one product with LoRA matrices, at most
SORTED, COMPARED = 32, 128  # pairs of one program that sorts, and those that it compares them with at once
COMBINED = 1024  # columns of a program that adds the experts of a token

_SLOTS = "Tensor slots, Tensor entries"
SCHEMAS = {
    # positions [P], rows [3, P], bounds [groups + 1, 1]; `kinds` [T] doubles the number of experts
    "step_rows": "(Tensor index, Tensor? kinds, Tensor slots, int experts) -> Tensor[]",
    # into low, by token, or with `rows` by row; then `slots` are those of the rows. Units: of two modules, which read x by
    # token, or of both kinds of slots for one module
    "step_shrink": f"(Tensor x, Tensor? rows, {_SLOTS}, int[] units, int modules, int rank, Tensor(a!) low) -> ()",
    # `gate`: 0 for one module, whose rows are multiplied with `shares`, or SILU, GELU or CLAMPED for two. Units: of the modules in
    # slots of kind 0, then of kind 1
    "step_expand": "(Tensor x, Tensor[] weights, Tensor[] biases, int gate, Tensor low, Tensor shares, Tensor rows, Tensor tiles, "
    "Tensor entries, int[] units, bool plus, int height, Tensor(a!) y) -> ()",
    "step_combine": f"(Tensor y, Tensor low, Tensor positions, Tensor shares, {_SLOTS}, int unit) -> Tensor",
}


def row_tiles(height: int, item: int, *, gated: bool) -> Tiles:
    """Return the tiles of products with the weights of experts, for tiles of `height` rows and values of `item` bytes."""
    if item > 2:
        return Tiles(32, 32, 4, 2)
    columns = 64 if gated or height > ROW_ROWS else 128
    return Tiles(columns, 64, 4, 4 if height == ROW_ROWS else 3)


def sort_rows(index: torch.Tensor, kinds: torch.Tensor | None, slots: torch.Tensor, experts: int) -> list[torch.Tensor]:
    """Return the row of each pair, the table of rows, and the first row of each expert of each kind."""
    index = index.contiguous()
    positions, rows, bounds = outs = _new_rows(index, kinds, slots, experts)
    groups, count = len(bounds) - 1, index.numel()
    _programs().order_rows[(-(-(count + groups + 1) // SORTED),)](
        index, slots if kinds is None else kinds, slots, positions, rows, bounds, count, experts, groups,
        index.shape[1], KINDS=kinds is not None, BM=SORTED, BN=COMPARED,
    )  # fmt: skip
    return outs


def shrink(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    entries: torch.Tensor,
    units: Sequence[int],
    modules: int,
    rank: int,
    low: torch.Tensor,
) -> None:
    """Write `x A^T` of modules next to each other, for slots of at most `rank`, in rows of their adapters."""
    (count,), (height, width) = slots.shape, x.shape
    size = shrink_tiles(1, width, x.element_size())
    grid = (count, -(-rank // size.columns) * modules)
    _programs().step_shrink[grid](
        x, slots if rows is None else rows, slots, low, entries, *units, count, height, count // height, width,
        low.shape[1],
        BY_ROW=rows is not None, MODULES=modules, WIDE=programs_module().INTERPRETED,
        BM=RUN, BC=size.columns, BK=size.depth, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    entries: torch.Tensor,
    units: Sequence[int],
    plus: bool,  # arguments of ops are positional
    height: int,
    y: torch.Tensor,
) -> None:
    """Write the products of the rows in `tiles` of `height` rows with the weights of their experts, and LoRA with `plus`."""
    _, width, inputs = weights[0].shape
    size = row_tiles(height, x.element_size(), gated=gate != 0)
    count = len(tiles) - 1
    first, last = (biases[0], biases[-1]) if biases else (low, low)
    _programs().step_expand[(max(count, 1), -(-width // size.columns))](
        x, weights[0], weights[-1], first, last, low, y, shares, rows, tiles, entries, *units, inputs, width,
        pitch(weights[0]), first.stride(0), aligned(width), low.shape[1], shares.shape[1], rows.shape[1], len(shares), count,
        BIASED=bool(biases), GATE=gate, PLUS=plus, WIDE=programs_module().INTERPRETED,
        BM=height, BN=size.columns, BK=size.depth, BR=RANK, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip


def combine(
    y: torch.Tensor,
    low: torch.Tensor,
    positions: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
    unit: int,
) -> torch.Tensor:
    """Return the sum over each token's experts `[T, width]`, with a B that the experts share."""
    out = _new_sums(y, low, positions, shares)
    width = y.shape[1]
    _programs().step_combine[(len(out), -(-width // COMBINED))](
        y, low, positions, shares, slots, entries, unit, out, width, aligned(width), low.shape[1],
        shares.shape[1], BN=COMBINED, BR=RANK,
    )  # fmt: skip
    return out


def _programs() -> Any:
    from cotrain_workers.engine.lora.fused import step_expert_programs

    return step_expert_programs


def _new_rows(index: torch.Tensor, kinds: torch.Tensor | None, slots: torch.Tensor, experts: int) -> list[torch.Tensor]:
    count, groups = index.numel(), experts if kinds is None else 2 * experts
    return [slots.new_empty(shape, dtype=torch.int32) for shape in ((count,), (3, count), (groups + 1, 1))]


def _new_sums(y: torch.Tensor, _low: Any, _positions: Any, shares: torch.Tensor, *_: Any) -> torch.Tensor:
    return y.new_empty(len(shares), y.shape[1])


register(
    SCHEMAS,
    (sort_rows, shrink, expand, combine),
    (_new_rows, no_result, no_result, _new_sums),
)
