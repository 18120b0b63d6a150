"""The decoder against the trainer, against plain PEFT, and against itself alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from cotrain_workers.engine import Engine
from cotrain_workers.ops import Failure, Pass
from cotrain_workers.sample_ops import NewTokens, SampledSequence, SampleOutput, WeightsGone
from tests.support.decoding import (
    assert_nothing_is_held,
    assert_same,
    finish,
    output,
    request,
    trained_weights,
    trainer_logprobs,
)
from tests.support.full_table import no_descriptor
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import MIX, PeftOracle, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from cotrain_workers.decoder import EngineDecoder
    from cotrain_workers.sample_ops import HostWeights, SampleRequest

    NewEngine = Callable[..., Engine]
    ModelFolder = Callable[..., Path]

VOCAB = 128
RUNS = [tenant.run for tenant in MIX]


def text(tokens: Sequence[int]) -> str:
    """Stand in for a byte-level tokenizer: token t is byte t + 97, so that 0 is "a"."""
    return bytes((token + 97) % 256 for token in tokens).decode(errors="replace")


def decoder_of(
    engine: Engine, weights: Mapping[str, HostWeights], kv_tokens: int = 4096
) -> EngineDecoder:
    """Return a decoder with pages of 16 tokens, so that short prompts have several."""
    return engine.decoder(
        weights.__getitem__, kv_tokens=kv_tokens, text=text, page_tokens=16, step_tokens=64
    )


def neighbours(seed: int, count: int = 32) -> list[SampleRequest]:
    """Return requests that differ in every way: adapters, lengths, parameters."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"neighbour-{at}",
            rng.integers(0, VOCAB, rng.integers(1, 80)),
            [None, *RUNS][at % (len(RUNS) + 1)],
            num_samples=int(rng.integers(1, 4)),
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(rng.choice([-1, 3, 40])),
            top_p=float(rng.choice([1.0, 0.4, 0.9])),
            seed=at,
            stop_tokens=frozenset({int(rng.integers(0, VOCAB))}),
            topk_sample_logprobs=int(rng.integers(0, 4)),
            topk_prompt_logprobs=int(rng.choice([0, 2])),
        )
        for at in range(count)
    ]


def whole(name: str, weights: str | None, length: int = 37) -> SampleRequest:
    """Return a request that asks for everything."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length)
    targets = np.random.default_rng(1).integers(-1, VOCAB, (length - 1, 3))
    return request(
        name,
        prompt,
        weights,
        num_samples=3,
        max_tokens=30,
        top_p=0.9,
        top_k=50,
        topk_sample_logprobs=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_trainers(new_engine: NewEngine, family: str) -> None:
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

    for each in requests:
        result = found[each.id]
        assert isinstance(result, SampleOutput)
        assert result.prompt_logprobs is not None
        for sequence in result.sequences:
            assert each.weights is not None
            tokens = np.concatenate([each.prompt, sequence.tokens])
            ours = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            theirs = trainer_logprobs(engine, each.weights, tokens)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seeded_request_gives_the_same_bits_in_any_batch(
    new_engine: NewEngine, family: str
) -> None:
    engine = new_engine(family)
    weights = trained_weights(engine)
    for run, num_samples in ((None, 3), ("all-8", 1), ("attn-1", 3)):
        mine = replace(whole("mine", run), num_samples=num_samples)

        alone = output(decoder_of(engine, weights), mine)
        among = output(decoder_of(engine, weights), mine, neighbours(seed=3))

        assert_same(among, alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_widths_that_break_cache_lines_keep_the_promise(tmp_path: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=72, vocab=131)))
        weights = trained_weights(engine)
        for run in ("all-8", "all-5", "head-16"):
            mine = whole("mine", run, length=70)
            alone = output(engine.decoder(weights.__getitem__, kv_tokens=4096, text=text), mine)
            decoder = engine.decoder(weights.__getitem__, kv_tokens=4096, text=text)
            assert_same(output(decoder, mine, neighbours(seed=5)), alone)
    finally:
        torch.set_num_threads(1)


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


def test_a_small_head_chunk_changes_no_bit(new_engine: NewEngine) -> None:
    wide, narrow = new_engine(), new_engine(head_chunk_rows=5)
    weights = trained_weights(wide)
    mine = whole("mine", "all-8")

    expected = output(decoder_of(wide, weights), mine, neighbours(seed=6, count=8))
    found = output(decoder_of(narrow, weights), mine, neighbours(seed=6, count=8))

    assert_same(found, expected)


def test_a_prefix_that_is_cached_changes_no_bit(new_engine: NewEngine) -> None:
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


def test_a_prompt_of_whole_pages_is_shared_though_it_was_the_middle_of_another(
    new_engine: NewEngine,
) -> None:
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


def test_preemption_changes_no_bit(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [
        request(
            f"r{at}", np.arange(at, at + 30), RUNS[at % 3], max_tokens=60, seed=at, num_samples=2
        )
        for at in range(6)
    ]
    roomy = finish(decoder_of(engine, weights), requests)
    tight = decoder_of(engine, weights, kv_tokens=16 * 16)

    found = finish(tight, requests)

    assert tight.preemptions > 5
    for name, expected in roomy.items():
        ours = found[name]
        assert isinstance(ours, SampleOutput)
        assert isinstance(expected, SampleOutput)
        assert_same(ours, expected)


def test_two_hundred_requests_over_eight_adapters_finish_in_room_for_sixteen(
    new_engine: NewEngine,
) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    keys = [None, *RUNS]
    decoder = decoder_of(engine, weights, kv_tokens=16 * 16 * 3)  # 16 sequences of three pages
    rng = np.random.default_rng(0)
    requests = [
        request(f"r{at}", rng.integers(0, VOCAB, 20), keys[at % 8], max_tokens=20, seed=at)
        for at in range(200)
    ]

    found = finish(decoder, requests)

    assert len(found) == 200
    for result in found.values():
        assert isinstance(result, SampleOutput)
        assert len(result.sequences[0].tokens) == 20


def test_the_oldest_request_is_never_preempted(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {}, kv_tokens=16 * 10)
    decoder.add(request("old", np.arange(40), max_tokens=100))
    for at in range(8):
        decoder.add(request(f"young-{at}", np.arange(at, at + 20), max_tokens=60))

    steps = 0
    while "old" not in [name for name, _ in decoder.step().finished]:
        steps += 1

    assert steps == 99
    assert decoder.preemptions > 0


@pytest.mark.parametrize("run", ["all-8", "head-16"])
def test_greedy_output_is_what_transformers_generates(
    new_engine: NewEngine, model_folder: ModelFolder, run: str
) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    tenant = next(tenant for tenant in MIX if tenant.run == run)
    oracle = PeftOracle(model_folder("qwen3"), tenant.spec, torch.float32)
    oracle.load(engine.layout(run), weights[run].flat)
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


def test_a_neighbour_whose_weights_are_not_finite_fails_alone(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    bad = replace(
        weights["all-8"],
        flat=weights["all-8"].flat.clone().index_fill_(0, torch.tensor([5]), float("nan")),
    )
    mine = whole("mine", "all-5")
    alone = output(decoder_of(engine, weights), mine)
    victim = request("victim", np.arange(20), "bad", num_samples=3)

    found = finish(decoder_of(engine, {**weights, "bad": bad}), [victim, mine])

    assert found["victim"] == Failure("The weights hold values that are not finite.", "user")
    assert isinstance(found["mine"], SampleOutput)
    assert_same(found["mine"], alone)


def test_a_neighbour_whose_numbers_overflow_fails_alone(new_engine: NewEngine) -> None:
    """Its keys and values are NaN in pages that others use next."""
    engine = new_engine()
    weights = trained_weights(engine)
    huge = replace(weights["all-8"], flat=weights["all-8"].flat * 1e30)
    mine = whole("mine", "all-5")
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, {**weights, "huge": huge}, kv_tokens=16 * 12)
    loud = [
        request(f"loud-{at}", np.arange(20 + at), "huge", num_samples=2, prompt_logprobs=at > 1)
        for at in range(4)
    ]

    found = finish(decoder, [*loud, mine])
    after = output(decoder, replace(mine, id="after"))

    for each in loud:
        assert found[each.id] == Failure("The model's log-probabilities are not finite.", "user")
    assert isinstance(found["mine"], SampleOutput)
    assert_same(found["mine"], alone)
    assert_same(after, alone)


def test_weights_that_cannot_be_read_now_are_waited_for(new_engine: NewEngine) -> None:
    engine = new_engine()
    stored, reads = trained_weights(engine), iter([no_descriptor, no_descriptor])

    def weights(key: str) -> HostWeights:
        next(reads, lambda: None)()
        return stored[key]

    decoder = engine.decoder(weights, kv_tokens=1024, text=None)
    found = finish(decoder, [request("late", [1, 2], RUNS[0])])
    assert isinstance(found["late"], SampleOutput)
    assert next(reads, None) is None


def test_weights_that_are_gone_fail_their_request_alone(new_engine: NewEngine) -> None:
    engine = new_engine()

    def weights(key: str) -> HostWeights:
        raise WeightsGone(key)

    decoder = engine.decoder(weights, kv_tokens=1024, text=None)
    found = finish(decoder, [request("gone", [1, 2], "gone"), request("base", [1, 2])])

    assert found["gone"] == Failure("The weights are gone.", "user")
    assert isinstance(found["base"], SampleOutput)


def test_weights_of_another_model_fail_their_request_alone(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    other = replace(weights["all-8"], flat=torch.zeros(5))

    decoder = decoder_of(engine, {"other": other})
    found = finish(decoder, [request("other", [1, 2], "other"), request("base", [1, 2])])

    assert found["other"] == Failure("The weights do not fit this base model.", "server")
    assert isinstance(found["base"], SampleOutput)


def test_more_adapters_than_fit_take_turns(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [request(f"r-{run}", np.arange(30), run) for run in RUNS for _ in (0,)]
    roomy = finish(decoder_of(engine, weights), requests)

    tight = engine.decoder(
        weights.__getitem__, kv_tokens=4096, text=None, page_tokens=16, weights_bytes=1
    )
    found = finish(tight, requests)

    assert len(tight.slots.held()) == 1
    for name, expected in roomy.items():
        ours = found[name]
        assert isinstance(ours, SampleOutput)
        assert isinstance(expected, SampleOutput)
        assert_same(ours, expected)


def test_cancelling_frees_everything_at_any_moment(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    decoder = decoder_of(engine, weights, kv_tokens=16 * 14)
    for steps in range(12):
        requests = neighbours(seed=steps, count=10)
        for each in requests:
            decoder.add(each)
        for _ in range(steps):
            decoder.step()

        for each in requests:
            decoder.cancel(each.id)

        assert not decoder.busy
        assert decoder.waiting == 0
        assert_nothing_is_held(decoder)
    decoder.cancel("unknown")


def test_waiting_counts_requests_that_have_not_begun(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {}, kv_tokens=16 * 4)
    for at in range(3):
        decoder.add(request(f"r{at}", np.arange(at, at + 40)))
    assert decoder.waiting == 3

    decoder.step()

    assert decoder.waiting == 2


def test_a_cached_prompt_is_no_other_tenants(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {})
    output(decoder, request("first", np.arange(40), tenant="one"))

    same = output(decoder, request("same", np.arange(40), tenant="one"))
    other = output(decoder, request("other", np.arange(40), tenant="two"))

    assert same.cached_prompt_tokens == 40
    assert other.cached_prompt_tokens == 0


def test_dropped_weights_leave_no_cached_prompt(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    decoder = decoder_of(engine, weights)
    output(decoder, request("first", np.arange(40), "all-8"))
    assert set(decoder._pinned.slots) == {None}  # nothing keeps what the slots let go

    decoder.drop_weights("all-8")

    assert decoder.pages.free == decoder.pages.count
    assert not decoder.slots.held()
    assert output(decoder, request("second", np.arange(40), "all-8")).cached_prompt_tokens == 0


def test_dropping_weights_in_use_disturbs_nobody(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = request("mine", np.arange(90), "all-8", num_samples=2)
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, weights)

    found = finish(decoder, [mine], lambda: decoder.drop_weights("all-8"))

    assert isinstance(found["mine"], SampleOutput)
    assert_same(found["mine"], alone)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gemma3"])
def test_decoding_between_micro_batches_leaves_training_bit_equal(
    new_engine: NewEngine, family: str
) -> None:
    alone = new_engine(family, micro_batch_tokens=64)
    shared = new_engine(family, micro_batch_tokens=64)
    weights = trained_weights(alone)
    trained_weights(shared)
    decoder = decoder_of(shared, weights)
    mine = whole("mine", "all-8")
    expected = output(decoder_of(alone, weights), mine)
    decoder.add(mine)
    found: dict[str, SampleOutput | Failure] = {}

    for cycle in (1, 2, 3):
        ops = [op for tenant in MIX for op in tenant.ops(cycle)]
        assert any(isinstance(op, Pass) for op in ops)
        shared.run(ops, between=lambda: found.update(decoder.step().finished))
        alone.run(ops)
    while decoder.busy:
        found.update(decoder.step().finished)

    for run in RUNS:
        assert same_bits(shared.state(run), alone.state(run)), run
    assert isinstance(found["mine"], SampleOutput)
    assert_same(found["mine"], expected)
