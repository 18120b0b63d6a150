"""Bytes that the fused LoRA kernels read and write, counted by their tiles.

Operands of a product with the base model's weights count once, as those of any other product:
programs that need them again run together. The operands of LoRA count as often as a program loads
them. Every adapter is assumed to have the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotrain_workers.engine.lora.fused.tile_sizes import LOW_COLUMNS, expand_tiles, gradient_tiles

FP32 = 4


def blocks(size: int, of: int) -> int:
    """Return the number of blocks of size `of` that cover `size` values."""
    return -(-size // of)


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)


def shrink(
    xs: Sequence[torch.Tensor],
    modules: int,
    _side: int,
    tiles: torch.Tensor,
    _entries: Any,
    columns: int,
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
    low: torch.Tensor,
    xs: Sequence[torch.Tensor],
    modules: int,
    _side: int,
    owners: torch.Tensor,
    *_: Any,
) -> int:
    """Return the bytes of `low^T x`: `low` once for each block of `x`, gradients read and written."""
    widths, joint = [x.shape[1] for x in xs], len(xs) < modules
    each = low.shape[1] if joint else low.shape[1] // modules
    size = gradient_tiles(modules if joint else 1, max(widths), xs[0].element_size())
    again = len(low) * each * sum(blocks(width, size.depth) for width in widths)
    gradients = 2 * FP32 * (len(owners) - 1) * each * sum(widths)
    return blocks(each, size.columns) * size_of(xs) + low.element_size() * again + gradients


#: By the name of the op.
BYTES: dict[str, Callable[..., int]] = {
    "lora_shrink": shrink,
    "lora_expand": expand,
    "lora_expand_back": expand_back,
    "lora_add_gradient": add_gradient,
}
