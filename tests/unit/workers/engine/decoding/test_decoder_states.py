"""Decoder of models with states in the pages: compared with the trainer, and with itself alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.kv_cache import affordable_tokens, default_page_tokens
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.model.linear_attention import StateShape
from tests.support.decoding import (
    assert_same,
    decoder_of,
    finish,
    neighbours,
    output,
    trained_weights,
    trainer_logprobs,
    whole,
)
from tests.support.training import NewEngine

UNSCORED: dict[str, Any] = {"prompt_logprobs": False, "topk_prompt_logprobs": 0, "target_prompt_logprobs": None}


@pytest.mark.numerics
def test_states_follow_pages(new_engine: NewEngine) -> None:
    engine = new_engine("qwen3_5")
    weights = trained_weights(engine)
    # A prompt ends with a page, or within one that three samples share until each copies it.
    mine = [replace(whole(f"mine-{run}", run, size), max_tokens=18) for run, size in (("all-8", 16), ("attn-1", 37))]
    tight, roomy = (decoder_of(engine, weights, kv_tokens=tokens) for tokens in (144, 4096))

    together = finish(tight, [*neighbours(seed=3, count=4), *mine])

    assert tight.preemptions > 0
    for each in mine:
        among, alone = together[each.id], output(roomy, each)
        assert_same(among, alone)
        again = output(roomy, replace(each, **UNSCORED))
        assert again.cached_prompt_tokens == len(each.prompt)
        assert each.weights is not None
        whole_sequences = [np.concatenate([each.prompt, own.tokens]) for own in alone.sequences]
        trained = trainer_logprobs(engine, each.weights, *whole_sequences)
        for own, cached, theirs in zip(alone.sequences, again.sequences, trained, strict=True):
            np.testing.assert_array_equal(cached.logprobs, own.logprobs)
            assert alone.prompt_logprobs is not None
            ours = np.concatenate([alone.prompt_logprobs[1:], own.logprobs])
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_pages_grow_with_the_their_states() -> None:
    """The numbers of Qwen3-Next-80B-A3B: 36 states, and keys and values in 12 layers."""
    shape, dtype = KvShape(12, 2, 256), torch.bfloat16
    state_bytes = 36 * StateShape((3, 8192), (32, 128, 128)).sizes(dtype.itemsize)

    assert state_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert default_page_tokens(shape, dtype, "cuda", state_bytes) == 2048
    assert default_page_tokens(shape, dtype, "cuda", 0) == 256
    assert default_page_tokens(shape, dtype, "cpu", state_bytes) == 64
    tokens = affordable_tokens(shape, 4096, dtype, 10 * 1024**3, state_bytes, 2048)
    assert tokens // 2048 * (2048 * shape.values * 2 + state_bytes) <= 10 * 1024**3
    assert affordable_tokens(shape, 4096, dtype, 10 * 1024**3, 0, 256) > 2 * tokens
