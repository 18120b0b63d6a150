"""Every field of a sample request, and every possible end of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import NOT_COMPUTED_LOGPROB
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.unembedding import likeliest
from cotrain_workers.engine.ops import HostWeights, WeightsMissing
from tests.support.decoding import output, request, target_logprobs, trained_weights, trainer_logprobs
from tests.support.training import MIX, NewEngine

VOCAB, CONTEXT = 128, 512
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 37)
RUN = MIX[0].run


def text(tokens: Sequence[int]) -> str:
    """Decode tokens 0..127 as the bytes of UTF-8."""
    return bytes((token + 128) % 256 for token in tokens).decode(errors="replace")


def no_weights(key: str) -> HostWeights:
    """Raise, as a store without weights does."""
    raise WeightsMissing(key)


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine()


@pytest.fixture
def decoder(engine: Engine) -> EngineDecoder:
    weights = trained_weights(engine)
    return engine.decoder(weights.__getitem__, kv_tokens=2048, text=text, page_tokens=16)


def greedy(decoder: EngineDecoder, **changes: Any) -> np.ndarray:
    """Return the tokens after PROMPT, each the most probable."""
    mine = request("greedy", PROMPT, RUN, temperature=0.0, **changes)
    return output(decoder, mine).sequences[0].tokens


def all_logprobs(engine: Engine, tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's log-probabilities of every token at every position, `[n, V]`."""
    every = np.tile(np.arange(VOCAB), (len(tokens), 1))
    (found,) = target_logprobs(engine, RUN, [(tokens, every)])
    return found


def test_a_stop_token_stays_in_the_output(decoder: EngineDecoder) -> None:
    unstopped = greedy(decoder, max_tokens=30)
    stop = int(unstopped[7])
    first = unstopped.tolist().index(stop)

    mine = request("m", PROMPT, RUN, temperature=0.0, max_tokens=30, stop_tokens=frozenset({stop}))
    found = output(decoder, mine).sequences[0]

    assert found.stop_reason == "stop"
    np.testing.assert_array_equal(found.tokens, unstopped[: first + 1])


def test_a_stop_string_across_tokens_ends_with_its_last_token(engine: Engine) -> None:
    decoder = engine.decoder(no_weights, kv_tokens=2048, text=lambda tokens: "".join(f"<{t}>" for t in tokens))
    unstopped = output(decoder, request("m", PROMPT, temperature=0.0, max_tokens=30)).sequences[0].tokens.tolist()
    stop = f"{unstopped[10]}><{unstopped[11]}"
    ends = [at for at in range(1, 30) if f"{unstopped[at - 1]}><{unstopped[at]}".endswith(stop)]

    mine = request("m", PROMPT, temperature=0.0, max_tokens=30, stop_strings=("nowhere", stop))
    found = output(decoder, mine).sequences[0]

    assert found.stop_reason == "stop"
    assert found.tokens.tolist() == unstopped[: ends[0] + 1]


def test_a_stop_string_may_begin_with_the_space_after_the_prompt(engine: Engine) -> None:
    def words(tokens: Sequence[int]) -> str:
        return "".join(f" <{token}>" for token in tokens).removeprefix(" ")

    decoder = engine.decoder(no_weights, kv_tokens=2048, text=words)
    first = output(decoder, request("m", PROMPT, temperature=0.0, max_tokens=1)).sequences[0]
    stop = f" <{first.tokens[0]}>"

    mine = request("m", PROMPT, max_tokens=30, temperature=0.0, stop_strings=(stop,))
    found = output(decoder, mine)

    assert found.sequences[0].tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("max_tokens", [0, 1, 30])
def test_a_sample_without_a_stop_has_the_requested_number_of_tokens(decoder: EngineDecoder, max_tokens: int) -> None:
    mine = request("m", PROMPT, RUN, max_tokens=max_tokens, num_samples=2, topk_sample_logprobs=3)
    found = output(decoder, mine)

    assert found.cached_prompt_tokens == 0
    for sequence in found.sequences:
        assert sequence.stop_reason == "length"
        assert sequence.tokens.shape == sequence.logprobs.shape == (max_tokens,)
        assert sequence.topk is not None
        assert sequence.topk.token_ids.shape == (max_tokens, 3)


def test_prompt_logprobs_may_be_requested_without_generated_tokens(engine: Engine, decoder: EngineDecoder) -> None:
    mine = request("m", PROMPT, RUN, max_tokens=0, prompt_logprobs=True, num_samples=2)
    found = output(decoder, mine)

    assert [len(sequence.tokens) for sequence in found.sequences] == [0, 0]
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    (expected,) = trainer_logprobs(engine, RUN, PROMPT)
    np.testing.assert_allclose(found.prompt_logprobs[1:], expected, rtol=0, atol=1e-5)


def test_a_prompt_may_have_one_token(decoder: EngineDecoder) -> None:
    mine = request("m", [5], RUN, prompt_logprobs=True, topk_prompt_logprobs=2)
    found = output(decoder, mine)

    assert len(found.sequences[0].tokens) == 12
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs).tolist() == [True]
    assert found.topk_prompt is not None
    assert found.topk_prompt.logprobs.tolist() == [[NOT_COMPUTED_LOGPROB] * 2]


@pytest.mark.parametrize("length", [CONTEXT - 5, CONTEXT])
def test_a_generation_ends_with_the_context(decoder: EngineDecoder, length: int) -> None:
    prompt = np.random.default_rng(1).integers(0, VOCAB, length)
    mine = request("m", prompt, RUN, max_tokens=None, prompt_logprobs=True)
    found = output(decoder, mine)

    assert found.sequences[0].stop_reason == "length"
    assert len(found.sequences[0].tokens) == CONTEXT - length
    assert found.prompt_logprobs is not None
    assert np.isfinite(found.prompt_logprobs[1:]).all()


def test_a_cache_smaller_than_the_context_limits_sequences(engine: Engine) -> None:
    decoder = engine.decoder(no_weights, kv_tokens=64, text=None, page_tokens=16)
    assert decoder.max_sequence_tokens == 48

    found = output(decoder, request("m", np.arange(20), max_tokens=None))

    assert len(found.sequences[0].tokens) == 28
    reason = decoder.refuse(request("m", np.arange(49)))
    assert reason == ("The prompt has 49 tokens; prompt and generated tokens together are at most 48 here.")


def test_prompt_logprobs_may_be_limited_to_the_last_positions(engine: Engine, decoder: EngineDecoder) -> None:
    targets = np.random.default_rng(2).integers(-1, VOCAB, (len(PROMPT) - 1, 2))
    output(decoder, request("before", PROMPT, RUN))
    mine = request("m", PROMPT, RUN, prompt_logprobs=True, prompt_logprobs_last_n=4, topk_prompt_logprobs=3)
    found = output(decoder, mine)

    assert found.cached_prompt_tokens == 32  # the last page holds all four rows
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[:-4]).all()
    expected = trainer_logprobs(engine, RUN, PROMPT)[0][-4:]
    np.testing.assert_allclose(found.prompt_logprobs[-4:], expected, rtol=0, atol=1e-5)
    assert found.topk_prompt is not None
    assert (found.topk_prompt.logprobs[:-4] == NOT_COMPUTED_LOGPROB).all()
    assert (found.topk_prompt.logprobs[-4:] > NOT_COMPUTED_LOGPROB).all()

    with_targets = output(decoder, replace(mine, id="t", target_prompt_logprobs=targets))

    assert with_targets.target_prompt_logprobs is not None
    skipped = np.isnan(with_targets.target_prompt_logprobs)
    np.testing.assert_array_equal(skipped, targets == -1)  # everywhere, for any last N
    assert with_targets.prompt_logprobs is not None
    np.testing.assert_array_equal(with_targets.prompt_logprobs, found.prompt_logprobs)
    assert with_targets.topk_prompt is not None
    np.testing.assert_array_equal(with_targets.topk_prompt.logprobs, found.topk_prompt.logprobs)


def test_topk_and_target_logprobs_equal_those_of_the_model(engine: Engine, decoder: EngineDecoder) -> None:
    targets = np.random.default_rng(2).integers(-1, VOCAB, (4, 3))
    mine = request(
        "m",
        PROMPT[:5],
        RUN,
        max_tokens=2,
        temperature=0.3,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=4,
        target_prompt_logprobs=targets,
    )
    found = output(decoder, mine)

    sequence = found.sequences[0]
    expected = all_logprobs(engine, np.concatenate([PROMPT[:5], sequence.tokens])[:6])
    best = np.argsort(-expected, axis=1)[:, :4]
    assert found.topk_prompt is not None
    assert sequence.topk is not None
    ids = np.concatenate([found.topk_prompt.token_ids[1:], sequence.topk.token_ids])
    logprobs = np.concatenate([found.topk_prompt.logprobs[1:], sequence.topk.logprobs])
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, best, 1), rtol=0, atol=1e-5)
    assert found.target_prompt_logprobs is not None
    wanted = np.take_along_axis(expected[:4], targets.clip(min=0), 1)
    np.testing.assert_allclose(found.target_prompt_logprobs, np.where(targets == -1, np.nan, wanted), rtol=0, atol=1e-5)


def test_logprobs_do_not_depend_on_temperature(engine: Engine, decoder: EngineDecoder) -> None:
    mine = request("m", PROMPT, RUN, temperature=0.3, top_k=5, top_p=0.8)
    sequence = output(decoder, mine).sequences[0]

    tokens = np.concatenate([PROMPT, sequence.tokens])
    expected = trainer_logprobs(engine, RUN, tokens)[0][len(PROMPT) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, rtol=0, atol=1e-5)


def test_top_k_of_one_is_greedy(decoder: EngineDecoder) -> None:
    found = output(decoder, request("m", PROMPT, RUN, top_k=1)).sequences[0]

    np.testing.assert_array_equal(found.tokens, greedy(decoder))


def test_different_seeds_differ_and_equal_seeds_repeat(decoder: EngineDecoder) -> None:
    first, same, other = (
        output(decoder, request(f"m{at}", PROMPT, RUN, seed=seed)).sequences[0].tokens.tolist()
        for at, seed in enumerate((1, 1, 2))
    )

    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": np.zeros(513, np.int64)}, "The prompt has 513 tokens"),
        ({"prompt": np.array([3, 128])}, "The prompt holds a token outside the vocabulary (0..127)."),
        ({"prompt": np.array([-1])}, "The prompt holds a token outside the vocabulary"),
        ({"target_prompt_logprobs": np.full((36, 1), 128)}, "outside the vocabulary"),
    ],
)
def test_an_impossible_request_is_refused_with_the_reason(
    decoder: EngineDecoder, changes: dict[str, Any], reason: str
) -> None:
    mine = request("m", PROMPT, RUN)
    assert decoder.refuse(mine) is None

    assert reason in (decoder.refuse(replace(mine, **changes)) or "")


def test_stop_strings_need_a_tokenizer(engine: Engine) -> None:
    decoder = engine.decoder(no_weights, kv_tokens=64, text=None)

    reason = decoder.refuse(request("m", [1], stop_strings=("x",)))

    assert reason == "Stop strings need a tokenizer, and this model has none; stop at token ids."


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 7, 300])
def test_equally_probable_tokens_are_ordered_by_id(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(-2, 3, (9, 300), generator=generator).to(dtype)
    logits[0, 5:] = -torch.inf

    ids, logprobs = likeliest(logits, k)

    expected = [sorted(range(300), key=row.__getitem__, reverse=True)[:k] for row in logits.tolist()]
    assert ids.tolist() == expected
    found = torch.log_softmax(logits.double(), -1).gather(1, ids.long())
    torch.testing.assert_close(logprobs.double(), found, rtol=0, atol=0.05)


def test_k_may_be_the_whole_vocabulary(decoder: EngineDecoder) -> None:
    mine = request("m", PROMPT, RUN, topk_sample_logprobs=VOCAB, top_k=VOCAB, max_tokens=2)
    found = output(decoder, mine).sequences[0]

    assert found.topk is not None
    assert sorted(found.topk.token_ids[0].tolist()) == list(range(VOCAB))
    np.testing.assert_allclose(np.exp(found.topk.logprobs).sum(axis=1), 1, rtol=1e-5)
