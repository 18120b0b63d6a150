"""Bodies of vLLM's `/v1/completions`, and its responses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cotrain_workers.engine.decoding.requests import NO_TOP_K, NOT_COMPUTED_LOGPROB, SampleRequest
from cotrain_workers.engine.spec import seed_of
from cotrain_workers.sampling.vllm.client import (
    Completion,
    ServerFacts,
    completion_body,
    parse_completion,
    refusal,
    sample_output,
)

FACTS = ServerFacts("base", context_tokens=10, adapts_unembedding=True)
REQUEST = SampleRequest(
    id="q",
    weights=None,
    prompt=np.array([5, 6, 7]),
    num_samples=2,
    max_tokens=4,
    temperature=0.7,
    top_k=NO_TOP_K,
    top_p=0.9,
    seed=-3,
    stop_tokens=frozenset({9, 2}),
    stop_strings=("\n\n",),
    prompt_logprobs=False,
    topk_prompt_logprobs=0,
    topk_sample_logprobs=0,
    prompt_logprobs_last_n=None,
    target_prompt_logprobs=None,
)


def body(sequence: int = 0, **changes: Any) -> dict[str, Any]:
    return completion_body(replace(REQUEST, **changes), sequence, "m", 10)


def choice(tokens: list[int], top: list[dict[int, float]] | None = None) -> dict[str, Any]:
    named = [{f"token_id:{token}": value for token, value in row.items()} for row in top or []]
    return {
        "finish_reason": "stop",
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-0.5 * token for token in tokens],
            "top_logprobs": named,
        },
        "prompt_logprobs": None,
    }


def test_a_request_body_uses_no_default_of_the_server() -> None:
    assert body() == {
        "model": "m",
        "prompt": [5, 6, 7],
        "n": 1,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed_of("-3:0"),
        "ignore_eos": True,
        "stop_token_ids": [2, 9],
        "stop": ["\n\n"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }
    json.dumps(body(top_k=5, prompt_logprobs=True))  # plain Python numbers throughout


@pytest.mark.parametrize(("wish", "sent"), [(None, 7), (4, 4), (99, 7), (0, 1)])
def test_a_generation_ends_with_the_context(wish: int | None, sent: int) -> None:
    assert body(max_tokens=wish)["max_tokens"] == sent


def test_the_prompt_is_scored_once_and_only_on_request() -> None:
    assert "prompt_logprobs" not in body()
    assert body(prompt_logprobs=True)["prompt_logprobs"] == 0
    assert body(topk_prompt_logprobs=3)["prompt_logprobs"] == 3
    assert body(target_prompt_logprobs=np.array([[6], [-1]]))["prompt_logprobs"] == 0
    assert "prompt_logprobs" not in body(1, prompt_logprobs=True, topk_prompt_logprobs=3)


def test_the_seeds_of_sequences_differ_and_are_in_range() -> None:
    seeds = {seed_of(f"{seed}:{i}") for seed in (-(2**63), 0, 1, 2**64 - 1) for i in range(8)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sequences_are_read_in_order_and_exactly() -> None:
    logprob = float(np.float32(-1.2345678))
    first, second = choice([4, 9]), choice([1])
    first["logprobs"]["token_logprobs"][0] = logprob
    output = sample_output(REQUEST, [Completion(first, 2), Completion(second, 3)])
    assert [sequence.tokens.tolist() for sequence in output.sequences] == [[4, 9], [1]]
    assert output.sequences[0].tokens.dtype == np.int32
    assert output.sequences[0].logprobs.dtype == np.float32
    assert output.sequences[0].logprobs[0] == np.float32(logprob)
    assert output.sequences[0].topk is None
    assert output.cached_prompt_tokens == 2
    assert output.prompt_logprobs is None


def test_the_drawn_token_is_in_the_top_k_only_if_it_is_one_of_them() -> None:
    rows = [{4: -9.0, 1: -0.1, 2: -0.5}, {1: -0.1, 2: -0.5}]
    asked = replace(REQUEST, topk_sample_logprobs=2)
    output = sample_output(asked, [Completion(choice([4, 1], rows), 0)])
    topk = output.sequences[0].topk
    assert topk is not None
    assert topk.token_ids.tolist() == [[1, 2], [1, 2]]
    assert topk.logprobs.tolist() == np.array([[-0.1, -0.5], [-0.1, -0.5]], np.float32).tolist()


def test_prompt_positions_without_a_score_are_marked() -> None:
    answered = {
        **choice([1]),
        "prompt_logprobs": [
            None,
            {"6": {"logprob": -2.0}, "8": {"logprob": -0.1}},
            {"7": {"logprob": -0.2}, "1": {"logprob": -3.0}},
        ],
    }
    asked = replace(
        REQUEST,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=1,
        target_prompt_logprobs=np.array([[6, -1], [-1, 7]]),
    )
    output = sample_output(asked, [Completion(answered, 0)])
    nan, none = np.nan, NOT_COMPUTED_LOGPROB
    assert output.prompt_logprobs is not None
    np.testing.assert_array_equal(output.prompt_logprobs, np.array([nan, nan, -0.2], np.float32))
    assert output.topk_prompt is not None
    assert output.topk_prompt.token_ids.tolist() == [[0, 0], [0, 0], [7, 1]]
    assert output.topk_prompt.logprobs[:2].tolist() == [[none, none], [none, none]]
    assert output.target_prompt_logprobs is not None
    np.testing.assert_array_equal(output.target_prompt_logprobs, np.array([[-2.0, nan], [nan, -0.2]], np.float32))


@pytest.mark.parametrize(
    "broken",
    [
        {"logprobs": None},
        {"prompt_logprobs": [None]},
        {"logprobs": {"tokens": [" the"], "token_logprobs": [0.0], "top_logprobs": []}},
    ],
)
def test_an_answer_of_another_form_is_an_error(broken: dict[str, Any]) -> None:
    asked = replace(REQUEST, prompt_logprobs=True)
    answered = {**choice([1]), "prompt_logprobs": [None, {}, {}], **broken}
    with pytest.raises((KeyError, TypeError, ValueError)):
        sample_output(asked, [Completion(answered, 0)])


def test_an_answer_without_details_has_no_cached_tokens() -> None:
    answer: dict[str, Any] = {"choices": [{"finish_reason": "stop"}], "usage": {}}
    for details in ({}, {"prompt_tokens_details": None}):
        answer["usage"] = details
        assert parse_completion(json.dumps(answer).encode()).cached_prompt_tokens == 0


def test_only_the_next_tokens_of_the_prompt_can_be_targets() -> None:
    assert refusal(replace(REQUEST, target_prompt_logprobs=np.array([[6], [7]])), FACTS) is None
    assert refusal(replace(REQUEST, target_prompt_logprobs=np.array([[6], [-1]])), FACTS) is None
    reason = refusal(replace(REQUEST, target_prompt_logprobs=np.array([[6], [8]])), FACTS)
    assert reason is not None


def test_a_prompt_leaves_at_least_one_token_of_the_context() -> None:
    assert refusal(replace(REQUEST, prompt=np.ones(9, np.int64)), FACTS) is None
    assert refusal(replace(REQUEST, prompt=np.ones(10, np.int64)), FACTS) is not None
    assert refusal(replace(REQUEST, prompt=np.ones(10, np.int64)), None) is None
