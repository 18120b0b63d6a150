"""What a pool can do, as its workers measured it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import PoolId


@dataclass(frozen=True)
class PoolRecord:
    """One base model and what its workers measured about it: all the API needs to check requests."""

    id: PoolId
    base_model: str
    architecture: str
    vocab_size: int
    context_length: int
    max_rank: int
    num_parameters: int
    device: str
    dtype: str
    numerics_id: str
    tokens_per_s: float
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: str = ""
    """Its folder's name under `<data_dir>/tokenizers/`; empty where the base model has none."""
    max_sequence_tokens: int = 0
    """What a prompt and its continuation may have together; 0 where the pool does not sample."""
    sampler: Literal["", "engine", "vllm"] = ""
    lora_widths: Mapping[str, int] = field(default_factory=dict)
    """Values that an adapter trains in `attn`, `mlp` and `unembed` for each unit of its rank: inputs and
    outputs of their modules. Empty where an older version's worker wrote this."""
