"""Decoder compared with the trainer, with plain PEFT, and with itself alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.coordination import drive
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Failure, Pass
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import (
    RUNS,
    VOCAB,
    assert_same,
    decoder_of,
    finish,
    neighbours,
    output,
    request,
    text,
    trained_weights,
    trainer_logprobs,
    whole,
)
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX, ModelFolder, NewEngine, PeftOracle, same_bits

#: Tokens per sample, sampled at least three times per test. Enough to begin a page of 16 after a
#: prompt of 37 or 70 tokens.
MINE_TOKENS = 14


@pytest.mark.parametrize("family", [variant("qwen3-window"), "gemma2"])
def test_logprobs_equal_those_of_the_trainer(new_engine: NewEngine, family: str) -> None:
    engine = new_engine(family)
    decoder = decoder_of(engine, trained_weights(engine))
    requests = [
        request(
            f"{run}-{size}",
            np.random.default_rng(size).integers(0, VOCAB, size),
            run,
            max_tokens=40,
            num_samples=2,
            prompt_logprobs=True,
        )
        for run in RUNS
        for size in (1, 16, 45)
    ]

    found = finish(decoder, requests)

    for run in RUNS:
        sequences, ours = [], []
        for each in [each for each in requests if each.weights == run]:
            result = found[each.id]
            assert isinstance(result, SampleOutput)
            assert result.prompt_logprobs is not None
            for sequence in result.sequences:
                sequences.append(np.concatenate([each.prompt, sequence.tokens]))
                ours.append(np.concatenate([result.prompt_logprobs[1:], sequence.logprobs]))
        assert len(sequences) == 6
        for mine, theirs in zip(ours, trainer_logprobs(engine, run, *sequences), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", [variant("qwen3"), "gemma2", variant("gemma3")])
@pytest.mark.numerics
def test_a_seeded_request_gives_the_same_bits_in_any_batch(new_engine: NewEngine, family: str) -> None:
    engine = new_engine(family)
    weights = trained_weights(engine)
    mine = [
        replace(whole(f"mine-{run}", run), num_samples=num_samples, max_tokens=MINE_TOKENS)
        for run, num_samples in ((None, 3), ("all-8", 1), ("attn-1", 3))
    ]

    together = finish(decoder_of(engine, weights), [*neighbours(seed=3), *mine])

    for each in mine:
        assert_same(together[each.id], output(decoder_of(engine, weights), each))


@pytest.mark.parametrize("threads", [variant(1), 2])
@pytest.mark.numerics
def test_widths_that_split_cache_lines_change_no_bit(tmp_path: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=72, vocab=131)))
        weights = trained_weights(engine)
        mine = [
            replace(whole(f"mine-{run}", run, length=70), max_tokens=MINE_TOKENS)
            for run in ("all-8", "all-5", "head-16")
        ]
        new_decoder = partial(engine.decoder, weights.__getitem__, kv_tokens=4096, text=text)
        together = finish(new_decoder(), [*neighbours(seed=5), *mine])
        for each in mine:
            assert_same(together[each.id], output(new_decoder(), each))
    finally:
        torch.set_num_threads(1)


@pytest.mark.numerics
def test_a_request_that_joins_later_gives_the_same_bits(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine, decoder = whole("mine", "all-5"), decoder_of(engine, weights)
    alone = output(decoder_of(engine, weights), mine)
    for each in neighbours(seed=4):
        decoder.add(each)
    for _ in range(9):
        decoder.step()

    among = output(decoder, mine)

    assert_same(among, alone)


@pytest.mark.numerics
def test_a_small_head_chunk_changes_no_bit(new_engine: NewEngine) -> None:
    wide, narrow = new_engine(), new_engine(head_chunk_rows=5)
    weights = trained_weights(wide)
    mine = whole("mine", "all-8")

    expected = output(decoder_of(wide, weights), mine, neighbours(seed=6, count=8))
    found = output(decoder_of(narrow, weights), mine, neighbours(seed=6, count=8))

    assert_same(found, expected)


@pytest.mark.parametrize("run", ["all-8", variant("head-16")])
def test_greedy_output_equals_that_of_transformers(new_engine: NewEngine, model_folder: ModelFolder, run: str) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    tenant = next(tenant for tenant in MIX if tenant.run == run)
    oracle = PeftOracle(model_folder("qwen3"), tenant.spec, torch.float32)
    oracle.load(engine.adapters[run].layout, weights[run].flat)
    prompt = np.random.default_rng(0).integers(3, VOCAB, 21)

    expected = oracle.model.generate(
        input_ids=torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
    )[0, len(prompt) :]
    mine = request("mine", prompt, run, temperature=0.0, max_tokens=40)
    found = output(decoder_of(engine, weights), mine, neighbours(seed=1, count=8))

    np.testing.assert_array_equal(found.sequences[0].tokens, expected.numpy())


@pytest.mark.parametrize("family", ["qwen3", variant("gemma2")])
def test_decoding_at_yield_points_changes_no_bit_of_training(new_engine: NewEngine, family: str) -> None:
    alone = new_engine(family, micro_batch_tokens=64)
    shared = new_engine(family, micro_batch_tokens=64)
    weights = trained_weights(alone)
    trained_weights(shared)
    decoder = decoder_of(shared, weights)
    mine = whole("mine", "all-8")
    expected = output(decoder_of(alone, weights), mine)
    decoder.add(mine)
    found: dict[str, SampleOutput | Failure] = {}

    for cycle in (1, 2):
        ops = [op for tenant in MIX for op in tenant.ops(cycle)]
        assert any(isinstance(op, Pass) for op in ops)
        drive(shared.cycle(ops), lambda: found.update(decoder.step().finished))
        alone.run(ops)
    while decoder.busy:
        found.update(decoder.step().finished)

    for run in RUNS:
        assert same_bits(shared.adapters.state(run), alone.adapters.state(run)), run
    assert_same(found["mine"], expected)


UNSCORED: dict[str, Any] = {"prompt_logprobs": False, "topk_prompt_logprobs": 0, "target_prompt_logprobs": None}


@pytest.mark.numerics
def test_samples_of_a_hybrid_have_the_bits_of_each_alone_cached_and_after_preemption(new_engine: NewEngine) -> None:
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


SPECS = {
    "all-8": AdapterSpec(8, 1),
    "mlp-3": AdapterSpec(3, 2, train_attn=False, train_unembed=False),
    "own-8": AdapterSpec(8, 3, per_expert=True),
}


@pytest.mark.numerics
@pytest.mark.parametrize("family", [variant(SOME[0]), *SOME[1:]])
def test_samples_of_mixtures_have_the_bits_of_each_alone_and_the_trainers_logprobs(
    new_engine: NewEngine, family: str
) -> None:
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
