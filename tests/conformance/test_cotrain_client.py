"""Our own client through the same server: large passes, many futures, compression, lent weights, sampling."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from cotrain import (
    AdamParams,
    Datum,
    Future,
    ModelInput,
    RequestFailed,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TrainingClient,
)
from cotrain.types import ForwardBackwardOutput
from tests.conformance.running import KEYS, Server
from tests.support.draws import variant
from tests.support.proxies import LossyProxy

VOCAB = 512
#: Far more than the 16 waiting requests that the narrow server accepts from a tenant. A thousand
#: futures are in tests/unit/client/requests/test_run_requests.py.
MANY = 45
#: Futures per group: 14 passes and a step. The plain loop waits for each group.
STEP_EVERY = 15
#: Time limit that detects a deadlock; it does not measure speed.
WITHIN_S = 240.0


def datum(length: int, seed: int) -> Datum:
    tokens = random.Random(seed).choices(range(VOCAB), k=length + 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


BATCH = [datum(length, seed=length) for length in (5, 9, 13, 8)]


def train(run: TrainingClient, steps: int = 3) -> list[list[float]]:
    """Train pipelined and list where the run got to."""
    for _ in range(steps):
        run.forward_backward(BATCH, "cross_entropy")
        run.optim_step(AdamParams(learning_rate=1e-2))
    return logprobs(run.forward(BATCH, "cross_entropy").result())


def logprobs(output: ForwardBackwardOutput) -> list[list[float]]:
    return [outputs["logprobs"].tolist() for outputs in output.loss_fn_outputs]


def test_1030_datums_come_back_whole(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    data = [datum(2 + index % 3, seed=index) for index in range(1030)]
    output = run.forward_backward(data, "cross_entropy").result()
    assert [len(row) for row in logprobs(output)] == [d.model_input.length for d in data]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs(output))))


@pytest.mark.parametrize(
    ("bad", "targets", "weights", "named"),
    [
        (1499, [1, VOCAB], [1.0, 1.0], "Target token id 512 at datum 1499, position 1"),
        variant(*(1300, [1, 2], [1.0, math.nan]), r"data\[1300\].loss_fn_inputs.weights\[1\] is not finite"),
        variant(0, [1, 2], [3e38, 3e38], "Loss is not finite"),
        (1499, [1, 2], [3e38, 3e38], "Loss is not finite"),
    ],
)
def test_a_large_pass_that_fails_adds_nothing(
    service: ServiceClient, server: Server, bad: int, targets: list[int], weights: list[float], named: str
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    data = [datum(2, seed=index) for index in range(1500)]
    data[bad] = Datum(model_input=data[bad].model_input, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    with pytest.raises(RequestFailed, match=named):
        run.forward_backward(data, "cross_entropy").result()
    assert (run.optim_step().result().metrics or {})["grad_norm"] == 0.0


def test_what_is_compressed_on_its_way_trains_the_same(service: ServiceClient, server: Server) -> None:
    data = [datum(100, seed=seed) for seed in range(4)]
    near = service.create_lora_training_client(server.base_model, rank=3, seed=9)
    with LossyProxy(server.address, []) as proxy, ServiceClient(proxy.address, KEYS[0]) as far_service:
        far = far_service.create_lora_training_client(server.base_model, rank=3, seed=9)
        far_output = far.forward(data, "cross_entropy").result()
    assert ("forward_backward", "zstd") in proxy.encodings
    assert far_output.loss_fn_outputs == near.forward(data, "cross_entropy").result().loss_fn_outputs


def test_another_tenants_checkpoint_is_loaded_with_its_key(service: ServiceClient, server: Server) -> None:
    owner = service.create_lora_training_client(server.base_model, rank=2, seed=1)
    expected = train(owner)
    path = owner.save_state("lent").result().path
    with ServiceClient(server.address, KEYS[1]) as other_service:
        run = other_service.create_lora_training_client(server.base_model, rank=2, seed=2)
        with pytest.raises(RequestFailed, match="not found"):
            run.load_state(path).result()
        run.load_state(path, weights_access_token=KEYS[0])
        assert logprobs(run.forward(BATCH, "cross_entropy").result()) == expected


def test_weights_for_elsewhere_have_a_size(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    saved = run.save_weights_external("out", ttl_seconds=3600).result()
    assert (saved.path or "").endswith("/out")
    assert (saved.size_bytes or 0) > 1_000


def send(run: TrainingClient, index: int) -> Future[Any]:
    if index % STEP_EVERY == STEP_EVERY - 1:
        return run.optim_step(AdamParams(learning_rate=1e-2))
    return run.forward_backward([datum(1 + index % 7, seed=index)], "cross_entropy")


def outcome(result: Any) -> object:
    """Return the content of a result without its times."""
    metrics = {name: value for name, value in result.metrics.items() if "clock_cycle" not in name}
    outputs = getattr(result, "loss_fn_outputs", [])
    return metrics, [output["logprobs"].tolist() for output in outputs]


def one_group_at_a_time(run: TrainingClient) -> list[object]:
    results = []
    for start in range(0, MANY, STEP_EVERY):
        futures = [send(run, index) for index in range(start, start + STEP_EVERY)]
        results += [outcome(future.result(WITHIN_S)) for future in reversed(futures)][::-1]
    return results


def test_many_futures_give_the_results_of_the_plain_loop(narrow_server: Server) -> None:
    with ServiceClient(narrow_server.address, KEYS[0]) as service:
        runs = [service.create_lora_training_client(narrow_server.base_model, rank=2, seed=1) for _ in range(2)]
        expected = one_group_at_a_time(runs[0])
        futures = [send(runs[1], index) for index in range(MANY)]
        assert [outcome(future.result(WITHIN_S)) for future in futures] == expected


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
