"""Sequences through the frozen base model, in one packed row."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.routing import Prompt


@dataclass(frozen=True)
class TokenRow:
    """Some sequences side by side, and filler sequences up to the padded length `T`."""

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray
    """int64 [T], from 0 in each sequence, or from the end of its prompt; with images `[3, T]`."""
    lengths: Sequence[int]  # of the sequences, filler included
    prompts: Mapping[int, Prompt]  # shared ones, by the index of the sequence


def token_row(
    slices: Iterable[Iterable[np.ndarray]], padded_tokens: int, align: int = 1, shared: Iterable[Sequence[int]] = ()
) -> TokenRow:
    """Put the sequences of some slices into one row of `padded_tokens`; each slice begins at a multiple
    of `align`.

    `shared` holds, for each slice, the first tokens of each sequence whose rows are those of an earlier sequence.
    """
    sequences: list[np.ndarray] = []
    prompts: dict[int, Prompt] = {}
    rows = first = 0
    for op_slice, prompt_lengths in zip(slices, chain(shared, repeat(())), strict=False):
        for tokens, prompt in zip(op_slice, chain(prompt_lengths, repeat(0)), strict=False):
            if prompt:
                prompts[len(sequences)] = Prompt(first, prompt)
            else:
                first = rows
            sequences.append(tokens[prompt:])
            rows += len(tokens) - prompt
        if filler := -rows % align:
            sequences.append(np.zeros(filler, np.int64))
            rows += filler
    if rows < padded_tokens:
        sequences.append(np.zeros(padded_tokens - rows, np.int64))
    lengths = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    for at, shared_rows in prompts.items():
        starts[at] -= shared_rows.length
    ids = np.concatenate(sequences)
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    return TokenRow(ids, positions, lengths, prompts)


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
