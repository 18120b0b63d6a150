"""The sequences of a packed row: where each lies, to what length it is padded, and what its rows may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from cotrain_workers.engine.device import to_device, unordered_writes

if TYPE_CHECKING:
    from collections.abc import Sequence


# A row of a GEMM is the same, bit for bit, in every matrix of 32 rows or more (measured on CPU fp32);
# below, other kernels are used. Steps of 32 waste at most 6 % from 512 tokens on; larger steps for larger
# rows keep the number of shapes low, for which a GPU library may choose different kernels.
FINE_STEP, FINE_LIMIT, COARSE_STEP = 32, 2048, 128
#: Rows of a block of flex attention.
BLOCK = 128


def bucket(tokens: int) -> int:
    """Return the padded length for `tokens` rows."""
    return up_to(tokens, FINE_STEP if tokens <= FINE_LIMIT else COARSE_STEP)


def up_to(tokens: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-tokens // step) * step


class EqualLengths(NamedTuple):
    """Neighbouring sequences of equal length; attention takes them in one call."""

    start: int
    sequences: int
    length: int


@dataclass
class SequenceTable:
    """The sequences of a packed row, filler included: `lengths` adds up to the padded length."""

    lengths: Sequence[int]
    device: torch.device
    equal_lengths: tuple[EqualLengths, ...] = field(init=False)
    longest: int = field(init=False)
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(init=False, default_factory=dict)
    _block_masks: dict[int | None, BlockMask] = field(init=False, default_factory=dict)
    _offsets: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.longest = max(self.lengths)
        groups = [(length, len(list(same))) for length, same in groupby(self.lengths)]
        starts = accumulate((length * count for length, count in groups), initial=0)
        self.equal_lengths = tuple(
            EqualLengths(start, count, length)
            for start, (length, count) in zip(starts, groups, strict=False)
        )

    def offsets(self) -> torch.Tensor:
        """Return where each sequence starts, and the end: int32 `[sequences + 1]`."""
        if self._offsets is None:
            ends = list(accumulate(self.lengths, initial=0))
            self._offsets = to_device(np.array(ends, np.int32), self.device)
        return self._offsets

    def block_mask(self, window: int | None) -> BlockMask:
        """Return what each row may see, for flex attention."""
        if window not in self._block_masks:
            self._block_masks[window] = block_mask(self.lengths, window, self.device)
        return self._block_masks[window]

    def mask(self, length: int, window: int | None) -> torch.Tensor:
        """Return bool `[length, length]`, true where a query may look: back, at most `window` tokens."""
        key = (length, window)
        if key not in self._masks:
            at = torch.arange(length, device=self.device)
            back = at[:, None] - at[None, :]
            self._masks[key] = (back >= 0) & (back < (window or length))
        return self._masks[key]


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
