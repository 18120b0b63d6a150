"""Sequences through the frozen base model, in one packed row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.base_model import BaseModel


@dataclass(frozen=True)
class TokenRow:
    """Some sequences side by side, and filler sequences up to the padded length `T`."""

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], from 0 in each sequence; with images `[3, T]`
    lengths: Sequence[int]  # of the sequences, filler included


def token_row(
    slices: Iterable[Iterable[np.ndarray]], padded_tokens: int, align: int = 1
) -> TokenRow:
    """Put the sequences of some slices into one row of `padded_tokens`; each slice begins at a multiple
    of `align`.
    """
    sequences: list[np.ndarray] = []
    rows = 0
    for op_slice in slices:
        own = list(op_slice)
        length = sum(map(len, own))
        filler = -length % align
        sequences += [*own, np.zeros(filler, np.int64)] if filler else own
        rows += length + filler
    if rows < padded_tokens:
        sequences.append(np.zeros(padded_tokens - rows, np.int64))
    lengths = [len(tokens) for tokens in sequences]
    positions = np.concatenate([np.arange(length) for length in lengths])
    return TokenRow(np.concatenate(sequences), positions, lengths)


def hidden_states(base: BaseModel, row: TokenRow) -> torch.Tensor:
    """Return the last hidden states `[1, T, d]`. The router must have the row's route."""
    device = base.head_weight.device
    ids = to_device(row.ids, device)[None]
    output = base.backbone(
        input_ids=ids,
        position_ids=to_device(row.positions, device)[..., None, :],
        # Given a mask of four dimensions, transformers builds none (looking for packed sequences, it
        # would wait for the device); ours says nothing, the segment table all.
        attention_mask=ids.new_zeros(1, 1, 1, 1),
        use_cache=False,  # with a cache transformers would not see the packing
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden
