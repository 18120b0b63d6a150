"""Decoder that starts a row before it has read the tokens of the previous row, as on a GPU, with unchanged results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.next_tokens import DrawParams, choose
from cotrain_workers.engine.decoding.requests import StepResults
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights
from tests.support.decoding import (
    RUNS,
    assert_all_same,
    assert_nothing_is_held,
    decoder_of,
    finish,
    neighbours,
    output,
    request,
    trained_weights,
    whole,
)
from tests.support.draws import variant
from tests.support.training import NewEngine


def overlapping(engine: Engine, weights: Mapping[str, HostWeights], kv_tokens: int = 4096) -> EngineDecoder:
    decoder = decoder_of(engine, weights, kv_tokens)
    assert not decoder.overlaps  # off on a CPU, where it has no benefit
    decoder.overlaps = True
    return decoder


def rows_of(decoder: EngineDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the item count of each row, negative for rows started early."""
    rows: list[int] = []
    forward = decoder.runner.forward

    def noted(plan, slots, chosen=None):  # type: ignore[no-untyped-def]
        found = forward(plan, slots, chosen)
        if found is not None:
            rows.append(len(found.items) * (-1 if chosen is not None else 1))
        return found

    monkeypatch.setattr(decoder.runner, "forward", noted)
    return rows


@pytest.mark.parametrize("pages", [variant(256), 14])
def test_requests_of_every_kind_have_the_same_bits_with_overlap(
    new_engine: NewEngine, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    asked = [
        *(replace(each, tenant=f"t{at % 3}") for at, each in enumerate(neighbours(3))),
        whole("whole", "all-8"),
        request("stops", np.arange(9), "all-5", max_tokens=200, stop_strings=("q", "zz")),
    ]
    expected = finish(decoder_of(engine, weights), asked)
    decoder = overlapping(engine, weights, kv_tokens=16 * pages)
    rows = rows_of(decoder, monkeypatch)

    found = finish(decoder, asked)

    assert sum(count < 0 for count in rows) > len(rows) / 4
    assert (decoder.preemptions > 0) == (pages == 14)
    assert_all_same(found, expected)


def test_a_token_after_a_stop_is_computed_once_and_never_returned(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    endless = request("m", np.arange(20), temperature=0.0, max_tokens=40)
    unstopped = output(decoder_of(engine, {}), endless).sequences[0].tokens.tolist()
    first = unstopped.index(unstopped[17])
    mine = replace(endless, id="mine", stop_tokens=frozenset({unstopped[17]}))
    decoder = overlapping(engine, {})
    rows = rows_of(decoder, monkeypatch)
    seen: list[int] = []

    decoder.add(mine)
    while decoder.busy:
        results = decoder.step()
        seen += [token for new in results.tokens for token in new.tokens]
        assert results.decoded_tokens == 1

    assert seen == unstopped[: first + 1]
    # One row for the prompt, one for each token but the last, and one after the last.
    assert sum(map(abs, rows)) == 2 + first + 1
    assert_nothing_is_held(decoder)
    assert output(decoder, replace(mine, id="again")).sequences[0].tokens.tolist() == seen


def test_nothing_is_computed_after_the_last_allowed_token(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = overlapping(new_engine(), {})
    rows = rows_of(decoder, monkeypatch)

    output(decoder, request("m", np.arange(10), max_tokens=7, num_samples=3))

    assert sum(map(abs, rows)) == 1 + 3 * 6


def test_a_new_request_begins_with_the_next_call_but_one(new_engine: NewEngine) -> None:
    decoder = overlapping(new_engine(), {})
    decoder.add(request("first", np.arange(20), max_tokens=100, tenant="a"))
    for _ in range(5):
        decoder.step()

    decoder.add(request("second", np.arange(9), max_tokens=2, tenant="b"))

    seen: list[StepResults] = [decoder.step() for _ in range(4)]
    assert [name for results in seen for name, _ in results.finished] == ["second"]
    # A call reads the row started before. The next call starts the prompt, and returns its first token.
    counts = [[new.request for new in results.tokens] for results in seen]
    assert counts[0] == ["first"]
    assert "second" in counts[1]


def test_a_cancelled_request_changes_no_bit_of_its_neighbours(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    asked = [request(f"r{at}", np.arange(at, at + 20), RUNS[at % 3], max_tokens=30, seed=at) for at in range(8)]
    expected = finish(decoder_of(engine, weights), asked)
    decoder = overlapping(engine, weights)
    steps = iter(range(1000))

    def cancel_one() -> None:
        at = next(steps)
        if at % 3 == 2:
            decoder.cancel(f"r{at // 3 * 2}")

    found = finish(decoder, asked, cancel_one)

    assert set(found) == {f"r{at}" for at in range(1, 8, 2)}
    assert_all_same(expected, found)


def test_a_token_chosen_from_non_finite_logits_is_in_the_vocabulary() -> None:
    logits = torch.full((3, 5), torch.nan)
    logits[1] = torch.inf

    found = choose(logits, [DrawParams(1.0, -1, 1.0, point) for point in (0.0, 0.5, 0.999)])

    assert ((found >= 0) & (found < 5)).all()
