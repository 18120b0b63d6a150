"""Sequences through the frozen base model, in one packed row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    output = base.backbone(
        input_ids=torch.from_numpy(row.ids)[None].to(device),
        position_ids=torch.from_numpy(row.positions)[None].to(device),
        use_cache=False,  # with a cache transformers would not see the packing
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden
