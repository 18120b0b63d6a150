"""Attention with a score cap, or a window, over a packed row on CUDA: flex attention, no dense mask.

The flash kernel of `attn.py` knows no score cap (Gemma 2), and before torch 2.11 no window. Which blocks
of 128 x 128 scores any sequence needs is worked out on the host from the lengths: nothing of size T x T
exists, and the device is not waited for.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cotrain_workers.engine.device import unordered_writes
from cotrain_workers.engine.model.attention_check import PROBE, agrees
from cotrain_workers.engine.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine.model.attention import Rule
    from cotrain_workers.engine.routing import SequenceTable

BLOCK = 128


def blocks_needed(
    lengths: Sequence[int], window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the key blocks that each query block may see: `(first, full_from, full_to)`, int64 each.

    Query block `i` sees keys of the blocks `first[i]` to `i`; in those from `full_from[i]` to
    `full_to[i]` (one past) every query sees every key.
    """
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)  # [T] of the sequence of each row
    rows = len(starts)
    top = np.arange(0, rows, BLOCK)  # first query of each block
    bottom = np.minimum(top + BLOCK, rows) - 1  # last
    reach = rows if window is None else window
    first = np.maximum(starts[top], top - reach + 1) // BLOCK
    # Seen by all queries of a block: keys of the sequence of its last one, that even this one reaches.
    all_see = np.maximum(starts[bottom], bottom - reach + 1)
    is_one_sequence = starts[bottom] <= top
    full_from = np.where(is_one_sequence, -(-all_see // BLOCK), top // BLOCK)
    full_to = top // BLOCK
    return first, np.minimum(full_from, full_to), full_to


def block_mask(lengths: Sequence[int], window: int | None, device: torch.device) -> BlockMask:
    """Return what each query of a packed row may see, as flex attention wants it."""
    first, full_from, full_to = blocks_needed(lengths, window)
    count = len(first)
    at = np.arange(count)
    causal = (at >= first[:, None]) & (at <= at[:, None])  # [query blocks, key blocks]
    full = (at >= full_from[:, None]) & (at < full_to[:, None])
    rows = sum(lengths)
    sequence = to_device(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), device)  # [T]

    def may_look(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (sequence[query] == sequence[key]) & (query >= key)

    def may_look_near(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (sequence[query] == sequence[key]) & (query >= key) & (query - key < window)

    with unordered_writes():  # torch marks the blocks of each key, all with the same value
        return BlockMask.from_kv_blocks(
            *ordered(causal & ~full, device),
            *ordered(full, device),
            BLOCK_SIZE=BLOCK,
            # Whatever number a mask function holds is compiled in: the window, and not the rows.
            mask_mod=may_look if window is None else may_look_near,
            seq_lengths=(rows, rows),
        )


def ordered(dense: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks each row of `dense` `[n, n]` names, and which: those first, int32."""
    counts = dense.sum(axis=1).astype(np.int32)
    which = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return to_device(counts, device)[None, None], to_device(which, device)[None, None]


def takes(q: torch.Tensor, k: torch.Tensor, rule: Rule) -> bool:
    """Return whether `attention` is to compute this: on CUDA in 16 bits, if it has proved right there."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return False
    if rule.softcap is None and rule.window is None:
        return False
    return is_right(q.device, q.dtype, (q.shape[1], k.shape[1], q.shape[2]), rule)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: SequenceTable, rule: Rule
) -> torch.Tensor:
    """Attend over the whole packed row; all `[T, heads, d]`."""
    return attend(q, k, v, table.block_mask(rule.window), rule)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, rule: Rule
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
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], rule: Rule
) -> bool:
    """Compare the compiled kernel with dense attention, once.

    `shape` is query heads, key-value heads and head size. Where it cannot be used, attention holds dense
    masks and scores.
    """
    mask = block_mask(PROBE, rule.window, device)
    attends = partial(attend, mask=mask, rule=rule)
    return agrees("Flex attention", attends, device, dtype, shape, rule)
