from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from pydantic import ValidationError

from cotrain import BadRequestError, ModelInput, SamplingParams, ServiceClient, TrainingClient
from tests.support.fake_api import refusal
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until

PATH = "tinker://s1:train:0/sampler_weights/"


@pytest.fixture
def api() -> FakeSampling:
    return FakeSampling()


@pytest.fixture
def run(api: FakeSampling) -> Iterator[TrainingClient]:
    with ServiceClient("http://server", "tml-key", network=api.network) as service:
        yield service.create_lora_training_client("m")


def test_saves_are_numbered_in_the_order_of_the_calls(api: FakeSampling, run: TrainingClient) -> None:
    run.optim_step()
    saved = run.save_weights_for_sampler("a", ttl_seconds=3600, user_metadata={"step": "1"})
    run.optim_step().result()
    assert saved.result().path == PATH + "a"
    (sent,) = api.bodies("save_weights_for_sampler")
    assert sent == {
        "model_id": "s1:train:0",
        "seq_id": 2,
        "path": "a",
        "kind": "snapshot",
        "ttl_seconds": 3600,
        "user_metadata": {"step": "1"},
        "type": "save_weights_for_sampler",
    }


def test_an_ephemeral_sampler_needs_no_second_call(api: FakeSampling, run: TrainingClient) -> None:
    sampler = run.save_weights_and_get_sampling_client()
    assert sampler.get_base_model() == "m"
    assert sampler.sampler_id == "s1:sample:0"
    assert "create_sampling_session" not in api.paths()
    assert sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams()).result().sequences


def test_a_named_sampler_is_made_from_the_saved_weights(api: FakeSampling, run: TrainingClient) -> None:
    asyncio.run(run.save_weights_and_get_sampling_client_async("best"))
    assert api.bodies("save_weights_for_sampler")[0]["path"] == "best"
    assert api.bodies("create_sampling_session")[0]["model_path"] == PATH + "best"


def test_a_sampler_has_the_weights_at_the_time_of_the_call(api: FakeSampling, run: TrainingClient) -> None:
    sampler = run.save_weights_and_get_sampling_client_async()
    run.optim_step().result()
    assert asyncio.run(sampler).sampler_id == "s1:sample:0"
    assert api.bodies("save_weights_for_sampler")[0]["seq_id"] == 1


def test_an_invalid_save_takes_no_number(api: FakeSampling, run: TrainingClient) -> None:
    with pytest.raises(ValidationError):
        run.save_weights_for_sampler("")
    run.optim_step().result()
    assert api.bodies("optim_step")[0]["seq_id"] == 1


def test_a_refused_save_leaves_no_gap_in_the_order(api: FakeSampling, run: TrainingClient) -> None:
    api.answers["save_weights_for_sampler"] = [refusal(400, "no")]
    with pytest.raises(BadRequestError):
        run.save_weights_for_sampler("a").result()
    assert list(api.passes) == ["pass:1"]


def test_a_cancelled_training_result_leaves_no_gap(api: FakeSampling, run: TrainingClient) -> None:
    api.answers["optim_step"] = [refusal(429, **{"Retry-After": "0.05"})]
    future = run.optim_step()
    asyncio.run(until(lambda: "optim_step" in api.paths()))  # and temporarily refused
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    run.optim_step().result()
    asyncio.run(until(lambda: len(api.bodies("optim_step")) == 3))
    assert sorted(body["seq_id"] for body in api.bodies("optim_step")) == [1, 1, 2]
    assert not api.cancelled
