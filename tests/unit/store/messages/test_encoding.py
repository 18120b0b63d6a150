from __future__ import annotations

import pytest

from cotrain_store.messages.encoding import decode
from cotrain_store.messages.pools import PoolRecord
from cotrain_store.messages.runs import LoraSpec


def test_a_field_that_is_not_there_yet_takes_its_default() -> None:
    assert decode(LoraSpec, {"rank": 2, "seed": 3, "new": 1}) == LoraSpec(rank=2, seed=3)
    with pytest.raises(TypeError):
        decode(LoraSpec, {"rank": 2})


def test_records_of_the_version_before_are_read() -> None:
    """A pool that an older worker wrote: it cannot sample, and says so."""
    fields = {
        "id": "p", "base_model": "m", "architecture": "Q", "vocab_size": 5, "context_length": 9,
        "max_rank": 8, "num_parameters": 1, "device": "cpu", "dtype": "float32",
        "numerics_id": "", "tokens_per_s": 1.0,
    }  # fmt: skip
    pool = decode(PoolRecord, fields)
    assert (pool.eos_token_ids, pool.tokenizer) == ((), "")
    assert (pool.max_sequence_tokens, pool.sampler) == (0, "")
