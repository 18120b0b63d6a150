"""Bytes that the kernels of the head's softmax read and write: all logits twice, their gradient once, and few others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cotrain_workers.engine.model.layer_kernels import COLUMNS
from tests.support.lora_traffic import FP32, blocks, size_of

NORMS = 2  # values per row


def softmax_norms(logits: torch.Tensor, *_: Any) -> int:
    """Return the bytes of the norms of all rows."""
    return size_of([logits]) + NORMS * FP32 * len(logits)


def softmax_pick(_logits: Any, _norms: Any, targets: torch.Tensor, *_: Any) -> int:
    """Return the bytes for the log-probs of some rows: only the logits of the targets are read."""
    return size_of([targets]) + FP32 * (2 * targets.numel() + NORMS * len(targets))


def softmax_backward(
    logits: torch.Tensor, _norms: Any, targets: torch.Tensor, slopes: torch.Tensor, grads: torch.Tensor, *_: Any
) -> int:
    """Return the bytes for the gradient of some rows: norms, targets and slopes once for each block of columns."""
    rows, width = len(targets), logits.shape[1]
    again = size_of([targets, slopes]) + NORMS * FP32 * rows
    return rows * width * (FP32 + grads.element_size()) + blocks(width, COLUMNS) * again


#: By the name of the op.
BYTES: dict[str, Callable[..., int]] = {each.__name__: each for each in (softmax_norms, softmax_pick, softmax_backward)}
