"""Representations of clients and results in a notebook or debugger: one line, and never a key."""

from __future__ import annotations

import threading

import pytest
from pydantic import BaseModel

from cotrain import AdamParams, Datum, ModelInput, RestClient, ServiceClient
from cotrain.types import (
    ForwardBackwardOutput,
    ImageChunk,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    TensorData,
    TrainingRunHistory,
)
from tests.support.fake_api import FakeApi
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until

KEY = "tml-id_secret"


async def test_a_client_shows_its_run_its_model_and_its_state() -> None:
    hold = threading.Event()
    api = FakeApi(hold={"step:1": hold})
    service = ServiceClient("http://ada:pass@server", KEY, network=api.network)
    assert repr(service) == "<ServiceClient of http://server, no session yet>"
    run = service.create_lora_training_client("m")
    stepped = run.optim_step(AdamParams())
    await until(lambda: "still running" in repr(stepped))
    assert repr(stepped) == "<Future of optim_step 1 of run s1:train:0: still running>"
    assert repr(service) == "<ServiceClient of http://server, session s1>"
    at = "m at http://server"
    assert repr(run) == f"<TrainingClient of run s1:train:0, 1 sent, 1 not done, {at}>"
    hold.set()
    stepped.result()
    await until(lambda: repr(run) == f"<TrainingClient of run s1:train:0, 1 sent, 0 not done, {at}>")
    service.close()
    assert repr(service) == "<ServiceClient of http://server, closed, session s1>"
    assert repr(run).endswith("m at http://server, closed>")


def test_a_sampler_and_a_rest_client_show_what_they_belong_to() -> None:
    with ServiceClient("http://server", KEY, network=FakeSampling().network) as service:
        sampler = service.create_sampling_client(base_model="m")
        rest = service.create_rest_client()
        assert repr(sampler) == f"<SamplingClient of sampler {sampler.sampler_id}, m at http://server>"
        assert repr(rest) == "<RestClient of http://server>"
        asked = rest.get_server_capabilities()
        asked.result()
        assert repr(asked) == "<Future of a call of <RestClient of http://server>: done>"
        for shown in (service, sampler, rest, asked):
            assert "secret" not in repr(shown)


def test_a_standalone_rest_client_shows_no_key() -> None:
    assert repr(RestClient(base_url="http://server", api_key=KEY)) == "<RestClient of http://server>"


LOGPROBS = [-0.5] * 2048
SAMPLED = SampledSequence(stop_reason="length", tokens=[3] * 2048, logprobs=LOGPROBS)
PASSED = ForwardBackwardOutput(
    loss_fn_output_type="ArrayRecord",
    loss_fn_outputs=[{"logprobs": TensorData(LOGPROBS, "float32")}] * 64,
    metrics={"loss:sum": 9.9050001234, "clock_cycle:unique": 694.0},
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (PASSED, "ForwardBackwardOutput(loss=9.905, datums=64, targets=131072, cycle=694)"),
        (SampleResponse(sequences=[SAMPLED] * 4), "SampleResponse(sequences=4, tokens=8192)"),
        (SAMPLED, "SampledSequence(stop_reason='length', tokens=<2048 elements>, logprobs=<2048 elements>)"),
        (
            Datum(ModelInput.from_ints(range(2048)), {"weights": LOGPROBS}),
            "Datum(ModelInput(length=2048), weights=[2048])",
        ),
        (
            ModelInput(chunks=[ImageChunk(data=bytes(4096), format="png", expected_tokens=6)]),
            "ModelInput(chunks=[ImageChunk(format='png', expected_tokens=6, type='image')])",
        ),
        (
            TensorData(LOGPROBS, "float32", [2, 1024]),
            "TensorData(data=<2048 elements>, dtype='float32', shape=[2, 1024])",
        ),
        (TensorData([1], "int64"), "TensorData(data=[1], dtype='int64')"),
        (
            TrainingRunHistory(training_run_id="r", points=[], metrics={"b": [], "a": []}),
            "TrainingRunHistory(training_run_id='r', points=0, metrics=['a', 'b'])",
        ),
        (OptimStepResponse(metrics={"grad_norm": 0.5}), "OptimStepResponse(metrics={'grad_norm': 0.5})"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseModel) else "",
)
def test_data_and_results_take_one_line(shown: BaseModel, text: str) -> None:
    assert repr(shown) == text
