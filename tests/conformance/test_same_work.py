"""The same work under each official SDK and under our own client: to the last bit the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cotrain import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from tests.conformance.running import NEWER_FIRST, Facts, Server, run_scenarios

STEPS = 4


@pytest.fixture(scope="module", params=NEWER_FIRST)
def official(request: pytest.FixtureRequest, server: Server) -> Facts:
    facts = run_scenarios(request.param, server.address, server.base_model, ["four_steps"], "same_work")
    return dict(facts["four_steps"])


@pytest.fixture
def run(official: Facts, service: ServiceClient, server: Server) -> TrainingClient:
    return service.create_lora_training_client(server.base_model, **official["lora"])


def data_of(official: Facts) -> list[Datum]:
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)},
        )
        for tokens, targets in zip(official["inputs"], official["targets"], strict=True)
    ]


def trained(official: Facts, run: TrainingClient) -> Facts:
    data, adam = data_of(official), AdamParams(learning_rate=official["learning_rate"])
    sent = [(run.forward_backward(data, "cross_entropy"), run.optim_step(adam)) for _ in range(STEPS)]
    return told([(loss.result(), step.result()) for loss, step in sent])


async def trained_async(official: Facts, run: TrainingClient) -> Facts:
    data, adam = data_of(official), AdamParams(learning_rate=official["learning_rate"])
    sent = [(run.forward_backward_async(data, "cross_entropy"), run.optim_step_async(adam)) for _ in range(STEPS)]
    return told([(await loss.result_async(), await (await step)) for loss, step in sent])


def told(steps: list[tuple[Any, Any]]) -> Facts:
    return {
        "losses": [loss.metrics["loss:sum"] for loss, _ in steps],
        "grad_norms": [step.metrics["grad_norm"] for _, step in steps],
        "logprobs": [row["logprobs"].tolist() for row in steps[-1][0].loss_fn_outputs],
    }


def sampled(official: Facts, sampler: SamplingClient) -> Facts:
    prompt = ModelInput.from_ints(official["prompt"])
    params = SamplingParams(**official["sampling"])
    response = sampler.sample(prompt, len(official["samples"]), params).result()
    return {
        "samples": [
            {"tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason} for s in response.sequences
        ],
        "scores": sampler.compute_logprobs(prompt).result(),
    }


def files_of(service: ServiceClient, path: str, folder: Path) -> dict[str, bytes]:
    service.download_checkpoint(path, folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_four_steps_have_the_same_losses_weights_and_samples(
    official: Facts, service: ServiceClient, run: TrainingClient, tmp_path: Path
) -> None:
    ours = trained(official, run)
    assert ours == {name: official[name] for name in ours}
    assert len(set(ours["losses"])) == STEPS

    weights = files_of(service, run.save_state("last").result().path, tmp_path / "ours")
    assert "adapter_model.safetensors" in weights
    assert weights == files_of(service, official["weights"], tmp_path / "theirs")

    samples = sampled(official, run.save_weights_and_get_sampling_client())
    assert samples == {name: official[name] for name in samples}


def test_four_steps_of_a_loop_have_the_same_losses(official: Facts, run: TrainingClient) -> None:
    ours = asyncio.run(trained_async(official, run))
    assert ours == {name: official[name] for name in ours}


def test_what_one_saved_the_other_goes_on_from(official: Facts, service: ServiceClient, run: TrainingClient) -> None:
    trained(official, run)
    theirs = service.create_training_client_from_state_with_optimizer(official["weights"])
    assert trained(official, theirs) == trained(official, run)
