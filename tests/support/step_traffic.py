"""Bytes that the kernels of a decoder step read and write for its experts.

Weights of experts count once. LoRA matrices count once for each row, as if all neighbours had other adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.lora_traffic import size_of


def shrink(
    x: torch.Tensor,
    _rows: Any,
    slots: torch.Tensor,
    _entries: Any,
    _units: Any,
    modules: int,
    rank: int,
    _low: Any,
) -> int:
    """Return the bytes of `low = x A^T`."""
    return size_of([x]) + x.element_size() * len(slots) * modules * rank * (x.shape[1] + 1)


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    _biases: Any,
    _gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    _rows: Any,
    _tiles: Any,
    _entries: Any,
    _units: Any,
    plus: bool,  # arguments of ops are positional
    _height: int,
    y: torch.Tensor,
) -> int:
    """Return the bytes of `y = x W^T + low B^T`."""
    pairs, width = y.shape
    read = pairs * x.shape[1]
    lora = pairs * low.shape[1] * (width + 1) if plus else 0
    return size_of([*weights, shares, y]) + x.element_size() * (read + lora)


def combine(y: torch.Tensor, low: torch.Tensor, positions: torch.Tensor, shares: torch.Tensor, *_: Any) -> int:
    """Return the bytes of the sum over the experts of tokens, and of `low B^T`."""
    tokens, width = len(shares), y.shape[1]
    return size_of([y, low, positions, shares]) + y.element_size() * tokens * width * (1 + low.shape[1])


#: By the name of the op.
BYTES: dict[str, Callable[..., int]] = {"step_shrink": shrink, "step_expand": expand, "step_combine": combine}
