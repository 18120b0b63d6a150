"""Attention with a score cap, or a window, over a packed row on CUDA: flex attention, no dense mask.

The flash kernel of `attention.py` knows no score cap (Gemma 2), and before torch 2.11 no window. Which blocks
of 128 x 128 scores any sequence needs is worked out on the host from the lengths: nothing of size T x T
exists, and the device is not waited for.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cotrain_workers.engine.model.attention_check import PROBE, agrees
from cotrain_workers.engine.sequence_table import block_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.routing import AttentionRule
    from cotrain_workers.engine.sequence_table import SequenceTable


def takes(q: torch.Tensor, k: torch.Tensor, rule: AttentionRule) -> bool:
    """Return whether `attention` is to compute this: on CUDA in 16 bits, if it has proved right there."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return False
    if rule.softcap is None and rule.window is None:
        return False
    return is_right(q.device, q.dtype, (q.shape[1], k.shape[1], q.shape[2]), rule)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: SequenceTable, rule: AttentionRule
) -> torch.Tensor:
    """Attend over the whole packed row; all `[T, heads, d]`."""
    return attend(q, k, v, table.block_mask(rule.window), rule)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, rule: AttentionRule
) -> torch.Tensor:
    """Attend within `mask`; all `[T, heads, d]`."""
    is_shared = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, d]
    out: torch.Tensor = kernel(q.device.type)(
        q,
        k,
        v,
        score_mod=None if rule.softcap is None else capped_score(rule.softcap),
        block_mask=mask,
        scale=rule.scaling,
        enable_gqa=is_shared,
    )
    return out[0].transpose(0, 1)


@cache
def capped_score(softcap: float) -> Callable[..., torch.Tensor]:
    """Return the score function of a cap; one function per cap, or each call would compile anew."""

    def cap(score: torch.Tensor, b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def kernel(device: str) -> Callable[..., Any]:
    """Return flex attention: compiled on CUDA (uncompiled it holds all scores), as it is elsewhere."""
    if device != "cuda":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


@cache
def is_right(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], rule: AttentionRule
) -> bool:
    """Compare the compiled kernel with dense attention, once.

    `shape` is query heads, key-value heads and head size. Where it cannot be used, attention holds dense
    masks and scores.
    """
    mask = block_mask(PROBE, rule.window, device)
    attends = partial(attend, mask=mask, rule=rule)
    return agrees("Flex attention", attends, device, dtype, shape, rule)
