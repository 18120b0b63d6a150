"""Sharing of prompts in the decoder, without a change of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cotrain_workers.engine.decoding.requests import NewTokens, SampledSequence, SampleOutput
from tests.support.decoding import assert_same, decoder_of, output, request, trained_weights, whole
from tests.support.training import NewEngine


def test_a_cached_prefix_changes_no_bit(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = request("mine", np.arange(50), "all-8", num_samples=2, max_tokens=30)
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, weights)
    assert alone.cached_prompt_tokens == 0

    longer = output(decoder, request("longer", np.arange(60), "all-8"))
    prefix = output(decoder, replace(mine, id="prefix"))
    again = output(decoder, replace(mine, id="again"))
    elsewhere = output(decoder, replace(mine, id="elsewhere", weights="all-5"))

    assert longer.cached_prompt_tokens == 0
    assert prefix.cached_prompt_tokens == 48  # three full pages of 16
    assert again.cached_prompt_tokens == 50
    assert elsewhere.cached_prompt_tokens == 0
    assert_same(prefix, alone)
    assert_same(again, alone)


def test_a_prompt_of_whole_pages_is_shared_with_a_longer_one(new_engine: NewEngine) -> None:
    engine = new_engine()
    mine = request("mine", np.arange(32), num_samples=2)
    alone = output(decoder_of(engine, {}), mine)
    decoder = decoder_of(engine, {})

    output(decoder, request("longer", np.arange(40)))
    found = output(decoder, mine)

    assert found.cached_prompt_tokens == 16  # its last page was computed for the last hidden state
    assert_same(found, alone)


def test_prompt_logprobs_are_computed_even_if_the_prompt_is_cached(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine, decoder = whole("mine", "all-8"), decoder_of(engine, weights)
    alone = output(decoder_of(engine, weights), mine)

    output(decoder, replace(mine, id="first"))
    again = output(decoder, mine)

    assert again.cached_prompt_tokens == 0
    assert_same(again, alone)


def test_identical_prompts_that_arrive_together_are_computed_once(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {})
    twins = [request(f"twin-{at}", np.arange(100), seed=at) for at in range(5)]
    for each in twins:
        decoder.add(each)
    computed = 0

    while decoder.busy:
        computed += decoder.step().prompt_tokens

    assert computed == 100


def test_the_samples_of_a_request_differ_and_share_their_prompt(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {})
    decoder.add(request("mine", np.arange(50), num_samples=6))
    computed = 0
    tokens: list[NewTokens] = []
    sequences: Sequence[SampledSequence] = []

    while decoder.busy:
        progress = decoder.step()
        computed += progress.prompt_tokens
        tokens += progress.tokens
        for _, result in progress.finished:
            assert isinstance(result, SampleOutput)
            sequences = result.sequences

    assert computed == 50
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 6
    for at, sequence in enumerate(sequences):
        own = [new for new in tokens if new.sequence == at]
        assert [new.offset for new in own] == list(range(12))
        assert [new.tokens[0] for new in own] == sequence.tokens.tolist()
        assert [new.logprobs[0] for new in own] == sequence.logprobs.tolist()


def test_a_cached_prompt_is_not_shared_with_another_tenant(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {})
    output(decoder, request("first", np.arange(40), tenant="one"))

    same = output(decoder, request("same", np.arange(40), tenant="one"))
    other = output(decoder, request("other", np.arange(40), tenant="two"))

    assert same.cached_prompt_tokens == 40
    assert other.cached_prompt_tokens == 0
