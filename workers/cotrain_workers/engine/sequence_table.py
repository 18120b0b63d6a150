"""The sequences of a packed row: where each lies, to what length it is padded, and what its rows may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.device import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence


# A row of a GEMM is the same, bit for bit, in every matrix of 32 rows or more (measured on CPU fp32);
# below, other kernels are used. Steps of 32 waste at most 6 % from 512 tokens on; larger steps for larger
# rows keep the number of shapes low, for which a GPU library may choose different kernels.
FINE_STEP, FINE_LIMIT, COARSE_STEP = 32, 2048, 128


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

    def mask(self, length: int, window: int | None) -> torch.Tensor:
        """Return bool `[length, length]`, true where a query may look: back, at most `window` tokens."""
        key = (length, window)
        if key not in self._masks:
            at = torch.arange(length, device=self.device)
            back = at[:, None] - at[None, :]
            self._masks[key] = (back >= 0) & (back < (window or length))
        return self._masks[key]
