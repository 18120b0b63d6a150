"""How much memory and work the decoder may use."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SEQUENCES = 256  # that run at once
STEP_TOKENS = {"cpu": 512, "cuda": 4096}  # of prompts, per step: the bound on activations


@dataclass(frozen=True)
class DecoderSizes:
    """How much memory and work a decoder may use; None lets it choose for the device."""

    kv_tokens: int | None
    page_tokens: int | None
    step_tokens: int | None
    weights_bytes: int | None
    head_chunk_rows: int


def sampler_bytes(default: int, share: int | None) -> int:
    """Return what sampler weights may take: on a GPU no more than a quarter of the decoder's share.

    `default` is what they take where nobody counts.
    """
    return default if share is None else min(default, share // 4)
