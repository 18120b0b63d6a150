"""Calls of programs for the hosted SDK: each works, or raises one sentence with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cotrain import AdamParams, Datum, ModelInput, SamplingClient, ServiceClient, UnsupportedInput, types
from tests.support.fake_sampling import FakeSampling

PROMPT = ModelInput.from_ints([7, 8, 9])


@pytest.fixture
def api() -> FakeSampling:
    return FakeSampling()


def test_a_client_can_be_used_as_its_own_future(service: ServiceClient) -> None:
    run = service.create_lora_training_client("m").result(timeout=1)
    sampler = service.create_sampling_client(base_model="m").result()

    async def awaited() -> tuple[object, object]:
        return await run, await sampler

    assert asyncio.run(awaited()) == (run, sampler)


def test_a_step_accepts_its_parameters_under_either_name(api: FakeSampling, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    run.optim_step(optim_params=AdamParams(learning_rate=0.5)).result()
    run.optim_step_async(adam_params=AdamParams(learning_rate=0.25)).result()
    sent = [body["adam_params"]["learning_rate"] for body in api.bodies("optim_step")]
    assert sent == [0.5, 0.25]
    with pytest.raises(UnsupportedInput, match="give one of them"):
        run.optim_step(AdamParams(), optim_params=AdamParams())


def test_an_argument_without_effect_is_accepted(service: ServiceClient) -> None:
    unnamed: Any = service  # type checkers know none of these
    run = unnamed.create_lora_training_client("m", optimizer=types.AdamOptimizerConfig())
    sampler = unnamed.create_sampling_client(base_model="m", retry_config=None, record_stability_info=False)
    assert len(sampler.sample(PROMPT, 2, prompt_alt_tokens_k=0).result().sequences) == 2
    assert run.model_id == "s1:train:0"


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [
        ("create_lora_training_client", {"optimizer": "dimuon"}, "must be types.AdamOptimizerConfig"),
        ("create_sampling_client", {"retry_config": object()}, r"ServiceClient\(policy="),
        ("create_sampling_client_async", {"record_stability_info": True}, "records no stability metrics"),
    ],
)
def test_an_unsupported_argument_raises_with_the_reason(
    service: ServiceClient, call: str, argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        asyncio.run(_awaited(getattr(service, call)("m", **argument)))


def test_a_refused_sampler_takes_no_number(api: FakeSampling, service: ServiceClient) -> None:
    run: Any = service.create_lora_training_client("m")
    with pytest.raises(UnsupportedInput, match="a sampler is always a snapshot"):
        run.save_weights_and_get_sampling_client(kind="inflight")
    run.save_weights_and_get_sampling_client(kind="snapshot")
    assert [body["seq_id"] for body in api.bodies("save_weights_for_sampler")] == [1]


def test_a_mistyped_argument_is_an_error(service: ServiceClient) -> None:
    with pytest.raises(TypeError, match="optimiser"):
        service.create_lora_training_client("m", optimiser=None)  # type: ignore[call-arg]


def test_a_missing_method_raises_with_the_reason(service: ServiceClient) -> None:
    clients: list[Any] = [service, service.create_lora_training_client("m")]
    for client in (*clients, service.create_sampling_client(base_model="m")):
        with pytest.raises(AttributeError, match="collects no telemetry"):
            client.get_telemetry()
        with pytest.raises(AttributeError, match=r"has no attribute 'traing'$"):
            client.traing()


def test_closing_returns_a_future_and_sends_the_detail(api: FakeSampling, service: ServiceClient) -> None:
    service.create_lora_training_client("m")
    assert service.close("interrupted", detail="lunch").result() is None
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "interrupted"}, "detail": "lunch"}]


def test_a_handle_identifies_a_sampler_and_contains_no_key(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = service.create_sampling_client(base_model="m")
    handle = sampler.get_sampler_handle()
    asked: list[str] = []

    def share(settings: Any) -> Any:
        asked.append(settings.api_key)
        return sampler._connection

    monkeypatch.setattr("cotrain.clients.sampling.shared_connection", share)
    other = SamplingClient.from_sampler_handle(handle, api_key="tml-other")
    assert (other.sampler_id, other.get_base_model()) == (sampler.sampler_id, "m")
    assert len(other.sample(PROMPT, 1).result().sequences) == 1
    assert asked == ["tml-other"]
    assert "tml-key" not in handle


@pytest.mark.parametrize("text", ["", "nothing", "bm9uZQ==", "{}"])
def test_an_invalid_handle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no handle of a sampler"):
        SamplingClient.from_sampler_handle(text, api_key="tml-key")


#: Usual mistakes, and a part of the answer with the remedy.
MISTAKES: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda service, run, sampler: run.optim_step(1e-4), r"must be AdamParams\(learning_rate"),
    (lambda service, run, sampler: run.optim_step(lr=1e-4), r"pass AdamParams\(learning_rate"),
    (lambda service, run, sampler: run.sample(PROMPT), "save_weights_and_get_sampling_client"),
    (lambda service, run, sampler: sampler.sample([PROMPT, PROMPT]), "one call per prompt"),
    (lambda service, run, sampler: service.create_lora_training_client("m", lora_alpha=8), "the argument is alpha"),
    (
        lambda service, run, sampler: service.create_lora_training_client("m", target_modules=[]),
        "train_attn, train_mlp and train_unembed",
    ),
    (
        lambda service, run, sampler: service.create_lora_training_client("m", bias="none"),
        r"ServiceClient\.create_lora_training_client\(\) got an unexpected",
    ),
    (lambda service, run, sampler: RESULT["loss"], r"use \.loss, \.metrics"),
    (lambda service, run, sampler: RESULT.metrics["loss"], r"loss:sum; the mean loss is"),
]
RESULT: Any = types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[], metrics={"loss:sum": 2.0})


@pytest.mark.parametrize(("mistake", "remedy"), MISTAKES)
def test_a_usual_mistake_is_answered_with_its_remedy(
    service: ServiceClient, mistake: Callable[[Any, Any, Any], Any], remedy: str
) -> None:
    run, sampler = service.create_lora_training_client("m"), service.create_sampling_client("m")
    with pytest.raises((UnsupportedInput, AttributeError, TypeError, KeyError), match=remedy):
        mistake(service, run, sampler)


def test_targets_that_equal_the_input_are_reported_once(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = service.create_lora_training_client("m")
    for tokens, targets in (([1, 2, 3], [2, 3, 4]), ([7, 7], [7, 7]), ([1, 2], [1, 2]), ([3, 4], [3, 4])):
        inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)}
        run.forward_backward([Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy")
        assert ("not shifted?" in caplog.text) is (tokens == targets and tokens != [7, 7])
    assert caplog.text.count("not shifted?") == 1


async def _awaited(value: Any) -> None:
    await value
