"""Weights in the decoder: many, too many, damaged, deleted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.ops import Failure, HostWeights, WeightsMissing
from tests.support.decoding import (
    RUNS,
    assert_all_same,
    assert_same,
    decoder_of,
    finish,
    output,
    request,
    trained_weights,
    whole,
)
from tests.support.full_table import no_descriptor
from tests.support.training import NewEngine


def test_a_neighbour_with_non_finite_weights_fails_alone(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    good = weights["all-8"]
    bad = HostWeights(good.spec, good.flat.clone().index_fill_(0, torch.tensor([5]), float("nan")))
    mine = whole("mine", "all-5")
    alone = output(decoder_of(engine, weights), mine)
    victim = request("victim", np.arange(20), "bad", num_samples=3)

    found = finish(decoder_of(engine, {**weights, "bad": bad}), [victim, mine])

    assert found["victim"] == Failure("The weights hold values that are not finite.", "user")
    assert_same(found["mine"], alone)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_neighbour_with_overflowing_values_fails_alone(new_engine: NewEngine, overlaps: bool) -> None:
    """Its keys and values are NaN in pages that other sequences use next.

    With overlap, the token after its NaN is looked up before the NaN has been read.
    """
    engine = new_engine()
    weights = trained_weights(engine)
    huge = HostWeights(weights["all-8"].spec, weights["all-8"].flat * 1e30)
    mine = whole("mine", "all-5")
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, {**weights, "huge": huge}, kv_tokens=16 * 12)
    decoder.overlaps = overlaps
    loud = [request(f"loud-{at}", np.arange(20 + at), "huge", num_samples=2, prompt_logprobs=at > 1) for at in range(4)]

    found = finish(decoder, [*loud, mine])
    after = output(decoder, replace(mine, id="after"))

    for each in loud:
        assert found[each.id] == Failure("The model's log-probabilities are not finite.", "user")
    assert_same(found["mine"], alone)
    assert_same(after, alone)


def test_weights_that_are_unreadable_for_now_are_read_again(new_engine: NewEngine) -> None:
    engine = new_engine()
    stored, reads = trained_weights(engine), iter([no_descriptor, no_descriptor])

    def weights(key: str) -> HostWeights:
        next(reads, lambda: None)()
        return stored[key]

    decoder = engine.decoder(weights, kv_tokens=1024, text=None)
    found = finish(decoder, [request("late", [1, 2], RUNS[0])])
    assert isinstance(found["late"], SampleOutput)
    assert next(reads, None) is None


def test_missing_weights_fail_their_request_alone(new_engine: NewEngine) -> None:
    engine = new_engine()

    def weights(key: str) -> HostWeights:
        raise WeightsMissing(key)

    decoder = engine.decoder(weights, kv_tokens=1024, text=None)
    found = finish(decoder, [request("gone", [1, 2], "gone"), request("base", [1, 2])])

    assert found["gone"] == Failure("The weights are gone.", "user")
    assert isinstance(found["base"], SampleOutput)


def test_weights_of_another_model_fail_their_request_alone(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    other = HostWeights(weights["all-8"].spec, torch.zeros(5))

    decoder = decoder_of(engine, {"other": other})
    found = finish(decoder, [request("other", [1, 2], "other"), request("base", [1, 2])])

    assert found["other"] == Failure("The weights do not fit this base model.", "server")
    assert isinstance(found["base"], SampleOutput)


def test_more_adapters_than_fit_are_served_in_turn(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [request(f"r-{run}", np.arange(30), run) for run in RUNS for _ in (0,)]
    roomy = finish(decoder_of(engine, weights), requests)

    tight = engine.decoder(weights.__getitem__, kv_tokens=4096, text=None, page_tokens=16, weights_bytes=1)
    found = finish(tight, requests)

    assert len(tight.slots.filled()) == 1
    assert_all_same(found, roomy)


def test_dropped_weights_leave_no_cached_prompt(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    decoder = decoder_of(engine, weights)
    output(decoder, request("first", np.arange(40), "all-8"))
    assert not decoder.slots.in_use()

    decoder.drop_weights("all-8")

    assert decoder.pages.free == decoder.pages.count
    assert not decoder.slots.filled()
    assert output(decoder, request("second", np.arange(40), "all-8")).cached_prompt_tokens == 0


def test_dropping_weights_in_use_changes_no_result(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = request("mine", np.arange(90), "all-8", num_samples=2)
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, weights)

    found = finish(decoder, [mine], lambda: decoder.drop_weights("all-8"))

    assert_same(found["mine"], alone)
