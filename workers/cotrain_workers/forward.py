"""Sequences through the frozen base model, in one packed row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cotrain_workers.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cotrain_workers.base_model import BaseModel


@dataclass(frozen=True)
class PackedRow:
    """Some sequences side by side, and a filler sequence up to the padded length `T`."""

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], from 0 in each sequence
    lengths: Sequence[int]  # of the sequences, filler included


def pack_row(sequences: Sequence[np.ndarray], padded_tokens: int) -> PackedRow:
    """Put sequences into one row of `padded_tokens`."""
    lengths = [len(tokens) for tokens in sequences]
    filler = padded_tokens - sum(lengths)
    if filler:
        lengths.append(filler)
    ids = np.zeros(padded_tokens, dtype=np.int64)
    ids[: padded_tokens - filler] = np.concatenate(sequences)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return PackedRow(ids, positions, lengths)


def hidden_states(base: BaseModel, row: PackedRow) -> torch.Tensor:
    """Return the last hidden states `[1, T, d]`. The router must have the row's route."""
    device = base.head_weight.device
    ids = to_device(row.ids, device)[None]
    output = base.backbone(
        input_ids=ids,
        position_ids=to_device(row.positions, device)[None],
        # Given a mask of four dimensions, transformers builds none (looking for packed sequences, it
        # would wait for the device); ours says nothing, the segment table all.
        attention_mask=ids.new_zeros(1, 1, 1, 1),
        use_cache=False,  # with a cache transformers would not see the packing
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden
