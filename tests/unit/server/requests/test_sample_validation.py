"""Validation of sample requests: the wording of each refusal, and that no invalid request is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_server.errors import Invalid
from cotrain_server.requests.sample_validation import MAX_STOPS, check_sample
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.messages.runs import PoolRecord
from tests.support.http_api import POOL

LAST = POOL.vocab_size - 1


def body(**changes: Any) -> SampleBody:
    whole = SampleBody(
        prompt=(1, 2, 3),
        num_samples=1,
        max_tokens=None,
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        seed=None,
        stop=None,
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_sample_logprobs=0,
        prompt_logprobs_last_n=None,
        target_prompt_logprobs=None,
        stream=False,
    )
    return replace(whole, **changes)


def refusal(pool: PoolRecord = POOL, **changes: Any) -> str:
    with pytest.raises(Invalid) as refused:
        check_sample(body(**changes), pool)
    return str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": (LAST,) * POOL.max_sequence_tokens},
        {"num_samples": 1_024},
        {"max_tokens": 0},
        {"max_tokens": 2**31 - 1},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": POOL.vocab_size},
        {"top_p": 1e-9},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": ()},
        {"stop": (0, LAST)},
        {"stop": ("\n", "é" * 1_024)},
        {"topk_prompt_logprobs": 128, "topk_sample_logprobs": 128},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"target_prompt_logprobs": ((-1, 0), (LAST, -1))},
        {"prompt": (5,), "target_prompt_logprobs": ()},
    ],
)
def test_a_request_within_the_limits_is_accepted(changes: dict[str, Any]) -> None:
    check_sample(body(**changes), POOL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt has 0 tokens; tiny/model samples from prompts of 1 to 64."),
        ({"prompt": (1,) * 65}, "prompt has 65 tokens; tiny/model samples from prompts of 1 to 64."),
        ({"prompt": (1, 512)}, "prompt: token id 512 at position 1 is outside the vocabulary (0..511)."),
        ({"prompt": (-1, 2)}, "prompt: token id -1 at position 0 is outside the vocabulary (0..511)."),
        ({"num_samples": 0}, "num_samples must be between 1 and 1024."),
        ({"num_samples": 1_025}, "num_samples must be between 1 and 1024."),
        ({"max_tokens": -1}, "max_tokens must be between 0 and 2147483647."),
        ({"temperature": -0.1}, "temperature must be a finite number, 0 or more."),
        ({"temperature": float("inf")}, "temperature must be a finite number, 0 or more."),
        ({"temperature": float("nan")}, "temperature must be a finite number, 0 or more."),
        ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1."),
        ({"top_p": 1.1}, "top_p must be greater than 0 and at most 1."),
        ({"top_p": float("nan")}, "top_p must be greater than 0 and at most 1."),
        ({"top_k": 0}, "top_k must be between 1 and 512, the size of the vocabulary, or -1 for no limit."),
        ({"top_k": 513}, "top_k must be between 1 and 512, the size of the vocabulary, or -1 for no limit."),
        ({"seed": 2**64}, "seed must be between -9223372036854775808 and 18446744073709551615."),
        ({"stop": (1,) * 65}, "stop has 65 entries; the limit is 64."),
        ({"stop": ("a", "")}, "stop: each string must have 1 to 1024 characters."),
        ({"stop": ("a" * 1_025,)}, "stop: each string must have 1 to 1024 characters."),
        ({"stop": ("a" * 1_000,) * 5}, "stop: the strings have 5000 characters together. The limit is 4096."),
        ({"stop": (512,)}, "stop: token id 512 at position 0 is outside the vocabulary (0..511)."),
        ({"topk_prompt_logprobs": 129}, "topk_prompt_logprobs must be between 0 and 128."),
        ({"topk_sample_logprobs": 129}, "topk_sample_logprobs must be between 0 and 128."),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n needs prompt_logprobs."),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
            "prompt_logprobs_last_n must be between 1 and 2, one less than the prompt has tokens.",
        ),
        (
            {"target_prompt_logprobs": ((1,),)},
            "target_prompt_logprobs has 1 rows; the prompt has 2 tokens after its first.",
        ),
        (
            {"target_prompt_logprobs": ((1, -1), (-2, 1))},
            "target_prompt_logprobs[1, 0] is -2, which is outside the vocabulary (0..511) and not -1.",
        ),
    ],
)
def test_each_refusal_names_the_field_and_its_limit(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


def test_topk_is_limited_to_the_vocabulary() -> None:
    small = replace(POOL, vocab_size=10)
    assert refusal(small, topk_sample_logprobs=11) == ("topk_sample_logprobs must be between 0 and 10.")


def test_a_base_model_without_sampling_is_refused() -> None:
    assert refusal(replace(POOL, max_sequence_tokens=0)) == ("tiny/model cannot be sampled from here.")


def test_without_a_tokenizer_only_token_ids_can_be_stops() -> None:
    bare = replace(POOL, tokenizer="")
    assert refusal(bare, stop=("\n",)).startswith("stop: tiny/model has no tokenizer here")
    check_sample(body(stop=(7,)), bare)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=80),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=MAX_STOPS + 2),
)
def test_no_token_outside_the_vocabulary_is_accepted(prompt: list[int], stop: list[int]) -> None:
    try:
        check_sample(body(prompt=tuple(prompt), stop=tuple(stop)), POOL)
    except Invalid:
        return
    assert all(0 <= token < POOL.vocab_size for token in (*prompt, *stop))
    assert 1 <= len(prompt) <= POOL.max_sequence_tokens


def test_the_total_number_of_logprobs_of_a_request_is_limited() -> None:
    wide = replace(POOL, max_sequence_tokens=2**15)
    most = {"num_samples": 1_024, "topk_sample_logprobs": 128, "max_tokens": 128}
    check_sample(body(**most), wide)
    for more in ({"max_tokens": 129}, {"max_tokens": None}):
        message = refusal(wide, **{**most, **more})
        assert message.startswith("topk_sample_logprobs: 1024 samples of up to ")
        assert "at most 16777216" in message
    check_sample(body(num_samples=1_024), wide)


def test_experts_are_returned_by_the_engine_of_a_mixture() -> None:
    mixture = replace(POOL, expert_choices=(48, 8, 128), max_sequence_tokens=2**15)
    most = {"return_routed_experts": True, "num_samples": 21, "max_tokens": 2**15}
    check_sample(body(**most), mixture)
    assert refusal(mixture, **{**most, "num_samples": 22}) == (
        "return_routed_experts: 22 samples of up to 32765 tokens have 276799872 experts. The limit is 268435456. "
        "Ask for fewer samples or a smaller max_tokens."
    )
    assert refusal(POOL, return_routed_experts=True) == (
        "return_routed_experts: tiny/model has no experts to choose from. Leave it out."
    )
    served = replace(mixture, sampler="vllm")
    assert refusal(served, return_routed_experts=True) == (
        "return_routed_experts needs the sampler of the engine, not vLLM."
    )
