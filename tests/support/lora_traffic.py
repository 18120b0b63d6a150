"""Bytes that the LoRA kernels read and write, counted by their tiles.

Operands of a product with the base model's weights count once, as those of any other product:
programs that need them again run together. The operands of LoRA count as often as a program loads
them. Every adapter is assumed to have the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotrain_workers.engine.decoding import lora_kernel
from cotrain_workers.engine.lora.fused.tables import (
    LOW_COLUMNS,
    ROWS,
    SHRINK_ROWS,
    expand_tiles,
    expert_tiles,
    gradient_tiles,
)

FP32 = 4


def blocks(size: int, of: int) -> int:
    """Return the number of blocks of size `of` that cover `size` values."""
    return -(-size // of)


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)


def shrink(
    xs: Sequence[torch.Tensor], modules: int, _side: int, tiles: torch.Tensor, _entries: Any, columns: int
) -> int:
    """Return the bytes of `low = x M^T`: `x` once for each block of columns, M once for each tile of rows."""
    widths, joint = [x.shape[1] for x in xs], len(xs) < modules
    each = columns if joint else columns // modules
    passes = blocks(each, LOW_COLUMNS[modules if joint else 1])
    item = xs[0].element_size()
    return passes * size_of(xs) + item * (len(xs[0]) * columns + len(tiles) * each * sum(widths))


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    gate: int,
    low: torch.Tensor,
    tiles: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of `y = x W^T + low B^T`: `low` once for each block of outputs, B for each
    tile.

    With a gate, the product of two outputs is written too.
    """
    widths, each = [len(weight) for weight in weights], low.shape[1] // len(weights)
    wide = expand_tiles(max(widths), x.element_size(), tma=True, gated=gate != 0).columns
    again = len(x) * each * sum(blocks(width, wide) for width in widths)
    written = len(x) * (sum(widths) + (widths[0] if gate else 0))
    lora = again + len(tiles) * each * sum(widths)
    given = [x, *weights, *biases, *([] if residual is None else [residual])]
    return size_of(given) + x.element_size() * (written + lora)


def expand_back(
    gys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gated: Sequence[torch.Tensor],
    _gate: int,
    low: torch.Tensor,
    tiles: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of the gradient of `x`: `low` once for each block of inputs, A for each
    tile.

    With a gate, two gradients are written, and the inputs of the gate are read.
    """
    inputs = weights[0].shape[1]
    size = expand_tiles(inputs, low.element_size(), tma=True, gated=bool(gated))
    lora = low.numel() * blocks(inputs, size.columns)
    lora += len(tiles) * low.shape[1] * inputs
    written = len(low) * inputs * (len(gated) or 1)
    return size_of([*gys, *weights, *gated]) + low.element_size() * (written + lora)


def add_gradient(
    low: torch.Tensor, xs: Sequence[torch.Tensor], modules: int, _side: int, owners: torch.Tensor, *_: Any
) -> int:
    """Return the bytes of `low^T x`: `low` once for each block of `x`, gradients read and written."""
    widths, joint = [x.shape[1] for x in xs], len(xs) < modules
    each = low.shape[1] if joint else low.shape[1] // modules
    size = gradient_tiles(modules if joint else 1, max(widths), xs[0].element_size())
    again = len(low) * each * sum(blocks(width, size.depth) for width in widths)
    gradients = 2 * FP32 * (len(owners) - 1) * each * sum(widths)
    return blocks(each, size.columns) * size_of(xs) + low.element_size() * again + gradients


def shrink_rows(x: torch.Tensor, _table: Any, most: int, largest: int, offsets: Sequence[int]) -> int:
    """Return the bytes of `x A^T` in a decoder step: A once for each tile of rows, `x` once for each block of A."""
    ranks, item = len(offsets) * largest, x.element_size()
    again = len(offsets) * blocks(largest, lora_kernel.RANKS)
    return item * (again * x.numel() + most * ranks * x.shape[1]) + FP32 * lora_kernel.SPLITS * len(x) * ranks


def expand_rows(
    x: torch.Tensor, sums: torch.Tensor, ys: Sequence[torch.Tensor], _table: Any, most: int, _offsets: Any
) -> int:
    """Return the bytes of `y += low B^T` in a decoder step: B once for each tile of rows, `low` once for each block."""
    widths, largest = [y.shape[1] for y in ys], sums.shape[2] // len(ys)
    columns = lora_kernel.expand_tiles(widths).columns
    low = FP32 * sums.shape[0] * sums.shape[1] * largest * sum(blocks(width, columns) for width in widths)
    return 2 * size_of(ys) + low + x.element_size() * most * largest * sum(widths)


def expert_groups(bounds: torch.Tensor) -> int:
    """Return the number of pairs of an expert and an adapter."""
    return (len(bounds) - 1) * ((bounds.shape[1] - 1) // 2)


def tile_adapters(rows: int, bounds: torch.Tensor) -> int:
    """Return the number of pairs of a tile and an adapter in it, if all groups have equally many rows."""
    experts = len(bounds) - 1
    return experts * blocks(blocks(rows, experts), ROWS) + expert_groups(bounds) - experts


def expert_shrink(
    xs: Sequence[torch.Tensor], modules: int, _side: int, bounds: torch.Tensor, _entries: Any, low: torch.Tensor
) -> int:
    """Return the bytes of `low = x M^T`: `x` once for each block of columns, M once for each program with rows."""
    width, item, each = xs[0].shape[1], low.element_size(), low.shape[1] // modules
    rows = blocks(len(low), max(expert_groups(bounds), 1))
    matrices = expert_groups(bounds) * blocks(rows, SHRINK_ROWS) * each * width * modules
    x = blocks(each, LOW_COLUMNS[1]) * modules * len(low) * width
    return item * (x + low.numel() + matrices)


def expert_expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    _biases: Any,
    gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    _tiles: Any,
    bounds: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of `y = x W^T + low B^T`: weights of all experts once, B for each adapter in each tile."""
    width = weights[0].shape[1]
    lora = low.numel() * blocks(width, expert_tiles(width, x.element_size()).columns)
    lora += tile_adapters(len(x), bounds) * low.shape[1] * width
    written = len(x) * width * (3 if gate else 1)
    return size_of([x, *weights, shares]) + x.element_size() * (lora + written)


def expert_expand_back(
    gys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gated: Sequence[torch.Tensor],
    _gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    _tiles: Any,
    bounds: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of the gradient of `x`, like those of `expert_expand`."""
    inputs = weights[0].shape[2]
    lora = low.numel() * blocks(inputs, expert_tiles(inputs, low.element_size()).columns)
    lora += tile_adapters(len(low), bounds) * low.shape[1] * inputs
    written = len(low) * inputs * (len(gated) or 1)
    return size_of([*gys, *weights, *gated, shares]) + low.element_size() * (written + lora)


def expert_gradient(
    low: torch.Tensor,
    xs: Sequence[torch.Tensor],
    modules: int,
    _side: int,
    _shares: Any,
    owners: torch.Tensor,
    _members: Any,
    bounds: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of `low^T x` for each adapter and expert, gradients read and written."""
    width, each = xs[0].shape[1], low.shape[1] // modules
    size = gradient_tiles(1, width, low.element_size())
    gradients = 2 * FP32 * (len(owners) - 1) * (len(bounds) - 1) * each * width * modules
    read = blocks(each, size.columns) * modules * len(low) * width
    return low.element_size() * (read + low.numel() * blocks(width, size.depth)) + gradients


#: By the name of the op.
BYTES: dict[str, Callable[..., int]] = {
    "expand_rows": expand_rows,
    "shrink_rows": shrink_rows,
    "lora_shrink": shrink,
    "lora_expand": expand,
    "lora_expand_back": expand_back,
    "lora_add_gradient": add_gradient,
    "expert_shrink": expert_shrink,
    "expert_expand": expert_expand,
    "expert_expand_back": expert_expand_back,
    "expert_gradient": expert_gradient,
}
