"""Sampling with the cotrain client on the same server."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import CancelledError, ProcessPoolExecutor
from typing import Any

import pytest

from cotrain import (
    AdamParams,
    BadRequestError,
    Datum,
    ModelInput,
    NotFoundError,
    SampledSequence,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TrainingClient,
)
from tests.conformance.running import KEYS, LOSES_SAMPLING_ANSWERS_OF, Server
from tests.support.lossy_proxy import LossyProxy

TOKENS = [7, 8, 9, 10, 11]
PROMPT = ModelInput.from_ints(TOKENS)
EIGHT = SamplingParams(max_tokens=8, seed=3, stop=[])
EXACT = 1e-5  # sampled log-probs against trained ones of the same tokens and weights, in fp32

Told = list[tuple[list[int], list[float] | None]]


@pytest.fixture(scope="module")
def sampler(service: ServiceClient, server: Server) -> SamplingClient:
    return service.create_sampling_client(base_model=server.base_model)


def told(sampler: SamplingClient, num_samples: int = 2, params: SamplingParams = EIGHT) -> Told:
    response = sampler.sample(PROMPT, num_samples, params).result()
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def told_by_handle(handle: str, api_key: str) -> Told:
    return told(SamplingClient.from_sampler_handle(handle, api_key=api_key))


def datum(sequence: SampledSequence, advantage: float) -> Datum:
    whole, before = TOKENS + sequence.tokens, [0.0] * (len(TOKENS) - 1)
    return Datum(
        model_input=ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": before + (sequence.logprobs or []),
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )


def reinforce(service: ServiceClient, base_model: str, seed: int, steps: int = 2) -> list[Told]:
    """Run a pipelined loop that rewards odd tokens. Return its samples."""
    run = service.create_lora_training_client(base_model, rank=2 + seed, seed=seed)
    sampler, log = run.save_weights_and_get_sampling_client(), []
    for step in range(steps):
        params = EIGHT.model_copy(update={"seed": 10 * seed + step})
        sequences = sampler.sample(PROMPT, 4, params).result().sequences
        rewards = [float(sum(token % 2 for token in s.tokens)) for s in sequences]
        mean = sum(rewards) / len(rewards)
        data = [datum(s, reward - mean) for s, reward in zip(sequences, rewards, strict=True)]
        loss = run.forward_backward(data, "importance_sampling")
        run.optim_step(AdamParams(learning_rate=1e-2))
        sampler = run.save_weights_and_get_sampling_client()
        for sequence, outputs in zip(sequences, loss.result().loss_fn_outputs, strict=True):
            trained = outputs["logprobs"].tolist()[len(TOKENS) - 1 :]
            assert sequence.logprobs == pytest.approx(trained, abs=EXACT, rel=0)
        log.append([(s.tokens, s.logprobs) for s in sequences])
    return [*log, told(sampler)]


def trained(service: ServiceClient, server: Server, rank: int = 3) -> TrainingClient:
    run = service.create_lora_training_client(server.base_model, rank=rank, seed=rank)
    move(run)
    return run


def move(run: TrainingClient) -> None:
    data = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [4, 5, 6], "weights": [1.0] * 3},
    )
    run.forward_backward([data], "cross_entropy")
    run.optim_step(AdamParams(learning_rate=1e-2)).result()


def test_a_seeded_sample_is_the_same_alone_and_under_load(sampler: SamplingClient) -> None:
    alone = told(sampler)
    crowd = [
        sampler.sample(ModelInput.from_ints([n + 1]), 1, SamplingParams(max_tokens=n % 9, seed=n))
        for n in range(32)
    ]
    assert told(sampler) == alone
    for future in crowd:
        future.result()


def test_every_sequence_has_a_unique_id(sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 3, EIGHT).result()
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    again = sampler.sample(PROMPT, 1, EIGHT).result()
    assert again.sequences[0].sequence_id not in {s.sequence_id for s in response.sequences}


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


def test_a_sampler_keeps_its_results_while_its_run_trains_on(
    service: ServiceClient, server: Server
) -> None:
    run = trained(service, server)
    path = run.save_weights_for_sampler("kept").result().path
    named, own = service.create_sampling_client(path), run.save_weights_and_get_sampling_client()
    before = told(named)
    move(run)
    run.save_weights_for_sampler("kept").result()
    assert told(named) == told(own) == before
    assert told(run.create_sampling_client(path or "")) != before
    assert named.get_base_model() == own.get_base_model() == server.base_model


def test_a_client_samples_from_other_processes(sampler: SamplingClient) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        samples = list(processes.map(told, [sampler] * 3))
        by_handle = processes.submit(told_by_handle, sampler.get_sampler_handle(), KEYS[0])
    assert samples == [told(sampler)] * 3
    assert by_handle.result() == samples[0]


def test_a_cancelled_sample_delays_no_other(sampler: SamplingClient) -> None:
    future = sampler.sample(PROMPT, 8, SamplingParams(max_tokens=400, stop=[]))
    asyncio.run(future.accepted_async())
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    assert told(sampler)


def test_a_tokenizer_comes_from_the_base_models_folder(
    service: ServiceClient, server: Server, sampler: SamplingClient
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    tokens = sampler.get_tokenizer().encode("def main():")
    assert tokens == run.get_tokenizer().encode("def main():")
    assert sampler.sample(ModelInput.from_ints(tokens), 1, EIGHT).result().sequences


def test_an_invalid_request_is_rejected_and_names_the_field(sampler: SamplingClient) -> None:
    with pytest.raises(BadRequestError, match="512"):
        sampler.sample(ModelInput.from_ints([1] * 600), 1, EIGHT).result()
    with pytest.raises(BadRequestError, match="top_k"):
        sampler.sample(PROMPT, 1, SamplingParams(top_k=513)).result()
    assert told(sampler)


def test_another_tenants_weights_are_not_found(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    path = run.save_weights_for_sampler("mine").result().path
    with (
        ServiceClient(server.address, KEYS[1]) as stranger,
        pytest.raises(NotFoundError),
    ):
        stranger.create_sampling_client(path)


def test_more_samples_than_the_queue_holds_all_return(narrow_server: Server) -> None:
    with ServiceClient(narrow_server.address, KEYS[0]) as service:
        sampler = service.create_sampling_client(base_model=narrow_server.base_model)
        futures = [sampler.sample(PROMPT, 1, EIGHT) for _ in range(24)]
        tokens = [future.result().sequences[0].tokens for future in futures]
    assert tokens == [tokens[0]] * 24


def test_a_dropped_answer_changes_no_bit(service: ServiceClient, server: Server) -> None:
    endpoints = {*LOSES_SAMPLING_ANSWERS_OF, "save_weights_for_sampler"}
    with (
        LossyProxy(server.address, endpoints) as proxy,
        ServiceClient(proxy.address, KEYS[0]) as far_service,
    ):
        far = reinforce(far_service, server.base_model, seed=5)
    assert endpoints - {"forward", "create_sampling_session"} <= set(proxy.lost)
    assert far == reinforce(service, server.base_model, seed=5)
