"""Sampling with the cotrain client on the same server."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from cotrain import ModelInput, SamplingClient, SamplingParams, ServiceClient, TensorData
from tests.conformance.running import KEYS, Server

TOKENS = [7, 8, 9, 10, 11]
PROMPT = ModelInput.from_ints(TOKENS)
EIGHT = SamplingParams(max_tokens=8, seed=3, stop=[])

Told = list[tuple[list[int], list[float] | None]]


@pytest.fixture(scope="module")
def sampler(service: ServiceClient, server: Server) -> SamplingClient:
    return service.create_sampling_client(base_model=server.base_model)


def told(sampler: SamplingClient, num_samples: int = 2, params: SamplingParams = EIGHT) -> Told:
    response = sampler.sample(PROMPT, num_samples, params).result()
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def told_by_handle(handle: str, api_key: str) -> Told:
    return told(SamplingClient.from_sampler_handle(handle, api_key=api_key))


def test_a_repeated_prompt_is_served_from_the_cache(sampler: SamplingClient) -> None:
    prompt = ModelInput.from_ints([n % 500 for n in range(300)])
    params = SamplingParams(max_tokens=2, seed=1)
    first, second = (sampler.sample(prompt, 1, params).result() for _ in range(2))
    assert first.prompt_cache_hit_tokens == 0
    assert second.prompt_cache_hit_tokens > 200
    assert first.sequences[0].tokens == second.sequences[0].tokens
    assert first.sequences[0].logprobs == second.sequences[0].logprobs


def test_all_scores_of_a_prompt_are_returned(sampler: SamplingClient) -> None:
    targets = TensorData.of([[TOKENS[n + 1], -1] for n in range(len(TOKENS) - 1)])
    response = sampler.sample(
        PROMPT,
        1,
        SamplingParams(max_tokens=3, temperature=0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=5,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    scores = response.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert scores == sampler.compute_logprobs(PROMPT).result()
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None
    assert response.target_prompt_logprobs is not None
    assert [row[0] for row in response.target_prompt_logprobs.tolist()] == scores[1:]
    (sequence,) = response.sequences
    assert sequence.topk_logprobs is not None
    likeliest = [row[0] for row in sequence.topk_logprobs if row]
    assert likeliest == list(zip(sequence.tokens, sequence.logprobs or [], strict=True))


def test_coroutines_sample_the_same(service: ServiceClient, server: Server) -> None:
    async def sample() -> Any:
        sampler = await service.create_sampling_client_async(base_model=server.base_model)
        futures = await asyncio.gather(*(sampler.sample_async(PROMPT, 1, EIGHT) for _ in range(3)))
        return [(await future).sequences[0].tokens for future in futures]

    tokens = told(service.create_sampling_client(base_model=server.base_model), 1)[0][0]
    assert asyncio.run(sample()) == [tokens] * 3


def test_a_client_samples_from_other_processes(sampler: SamplingClient) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        samples = list(processes.map(told, [sampler] * 3))
        by_handle = processes.submit(told_by_handle, sampler.get_sampler_handle(), KEYS[0])
    assert samples == [told(sampler)] * 3
    assert by_handle.result() == samples[0]


def test_a_tokenizer_comes_from_the_base_models_folder(
    service: ServiceClient, server: Server, sampler: SamplingClient
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    tokens = sampler.get_tokenizer().encode("def main():")
    assert tokens == run.get_tokenizer().encode("def main():")
    assert sampler.sample(ModelInput.from_ints(tokens), 1, EIGHT).result().sequences
