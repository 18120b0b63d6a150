"""Recipes of a sampling client and of its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tinker import types
from tinker.lib.retry_handler import RetryConfig

from tests.conformance.scoreboard.calls import Recipe, call, check
from tests.conformance.scoreboard.place import MAX_TOKENS, PROMPT, Place
from tests.conformance.scoreboard.service_recipes import samples


def sampling(sampler_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """Return the recipes of all methods of a sampling client."""
    return {
        **_samples(sampler_of),
        "compute_logprobs": lambda at: check(lambda row: len(row) == len(PROMPT), sampler_of(at), at.prompt),
        "compute_logprobs(prompt_logprobs_last_n)": lambda at: check(
            lambda row: row[-1] is not None, sampler_of(at), at.prompt, prompt_logprobs_last_n=2
        ),
        **{f"create{option}": _create(sampler_of, given) for option, given in CREATED.items()},
        "from_sampler_handle": lambda at: check(samples(at), sampler_of(at), at.sampler.get_sampler_handle()),
        "from_sampler_handle(api_key)": lambda at: check(
            samples(at), sampler_of(at), at.sampler.get_sampler_handle(), api_key=at.key
        ),
        "get_base_model": lambda at: check(lambda name: name == at.base_model, sampler_of(at)),
        "get_sampler_handle": lambda at: call(sampler_of(at)),
        "get_telemetry": lambda at: call(sampler_of(at)),
        "get_tokenizer": lambda at: check(lambda tokenizer: tokenizer.encode("a"), sampler_of(at)),
        "on_queue_state_change": lambda at: call(sampler_of(at), _active(), None),
    }


CREATED: Mapping[str, Callable[[Place], dict[str, Any]]] = {
    "": lambda at: {"base_model": at.base_model},
    "(model_path)": lambda at: {"model_path": at.sampler_path},
    "(record_stability_info)": lambda at: {"base_model": at.base_model, "record_stability_info": True},
    "(retry_config)": lambda at: {"base_model": at.base_model, "retry_config": RetryConfig()},
    "(sampling_session_id)": lambda at: {"base_model": at.base_model, "sampling_session_id": at.new_sampler_id()},
}


def _create(sampler_of: Callable[[Place], Any], given: Callable[[Place], dict[str, Any]]) -> Recipe:
    return lambda at: check(samples(at), sampler_of(at), at.service.holder, **given(at))


def _samples(sampler_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    def sample(holds: Callable[[Any], bool], **options: Any) -> Recipe:
        return lambda at: check(holds, sampler_of(at), at.prompt, 1, at.params, **options)

    targets = types.TensorData.from_torch(torch.tensor([[1]] * (len(PROMPT) - 1)))
    return {
        "sample": sample(_is_sampled),
        "sample(include_prompt_logprobs)": sample(lambda answer: answer.prompt_logprobs, include_prompt_logprobs=True),
        "sample(prompt_alt_tokens_k)": sample(_is_sampled, prompt_alt_tokens_k=2),
        "sample(prompt_logprobs_last_n)": sample(
            lambda answer: answer.prompt_logprobs[-1] is not None,
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=2,
        ),
        "sample(target_prompt_logprobs)": sample(
            lambda answer: answer.target_prompt_logprobs, include_prompt_logprobs=True, target_prompt_logprobs=targets
        ),
        "sample(topk_prompt_logprobs)": sample(
            lambda answer: answer.topk_prompt_logprobs, include_prompt_logprobs=True, topk_prompt_logprobs=2
        ),
        "sample(topk_sample_logprobs)": sample(
            lambda answer: answer.sequences[0].topk_logprobs, topk_sample_logprobs=2
        ),
    }


def _is_sampled(answer: Any) -> bool:
    return len(answer.sequences[0].tokens) == MAX_TOKENS


def _active() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE
