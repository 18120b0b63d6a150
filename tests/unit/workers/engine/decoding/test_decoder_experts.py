"""Decoder of mixtures of experts compared with the trainer, and with itself alone."""

from __future__ import annotations

import numpy as np
import pytest

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import VOCAB, assert_same, decoder_of, finish, output, request, trainer_logprobs
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.training import NewEngine

SPECS = {
    "all-8": AdapterSpec(8, 1),
    "mlp-3": AdapterSpec(3, 2, train_attn=False, train_unembed=False),
    "own-8": AdapterSpec(8, 3, per_expert=True),
}


@pytest.mark.numerics
@pytest.mark.parametrize("family", [variant(SOME[0]), *SOME[1:]])
def test_samples_of_experts(new_engine: NewEngine, family: str) -> None:
    engine = new_engine(family)
    weights = {run: random_weights(engine, run, spec) for run, spec in SPECS.items()}
    requests = [
        request(
            f"{run}-{size}",
            np.random.default_rng(size).integers(3, VOCAB, size),
            run,
            temperature=float(size < 20),
            num_samples=2 if size < 20 else 1,
            prompt_logprobs=True,
        )
        for run in (*SPECS, None)
        for size in (1, 17, 37)
    ]

    found = finish(decoder_of(engine, weights), requests)

    for each in requests:
        result = found[each.id]
        assert isinstance(result, SampleOutput)
        if each.weights in ("mlp-3", "own-8"):
            assert_same(result, output(decoder_of(engine, weights), each))
        if each.weights is not None:
            for sequence in result.sequences:
                whole = np.concatenate([each.prompt, sequence.tokens])
                (theirs,) = trainer_logprobs(engine, each.weights, whole)
                assert result.prompt_logprobs is not None
                ours = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
