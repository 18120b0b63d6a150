from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import cotrain.mint as mintx
from cotrain import BadRequestError, ModelInput, ServiceClient
from tests.support.fake_api import FakeApi, refusal

KL = "mint/forward_backward_reverse_kl"
MIX = "mint/checkpoints/interpolate"
PATHS = ["tinker://a:train:0/weights/one", "tinker://b:train:0/weights/two"]
DATUM = mintx.ReverseKLDatum(
    student_input=ModelInput.from_ints([1, 2]),
    reference_input=ModelInput.from_ints([3]),
    target_tokens=[4, 5],
    weights=[1.0, 0.5],
)
ROW = {"data": [0.75], "dtype": "float32", "shape": [1]}
KL_ANSWER = {"outputs": [{"loss": ROW}], "metrics": {"loss:sum": 0.75}}
MIXED = {"path": "tinker://c:train:0/sampler_weights/mix", "source_paths": PATHS}


def queued(api: FakeApi, path: str, result: dict[str, Any], times: int = 1) -> None:
    api.answers[path] = [httpx.Response(200, json={"request_id": "r"}) for _ in range(times)]
    api.answers["retrieve_future"] = [httpx.Response(200, json=result) for _ in range(times)]


def test_a_reverse_kl_is_numbered_among_the_requests_of_its_run(api: FakeApi, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    run.optim_step().result()
    queued(api, KL, KL_ANSWER)
    output = run.forward_backward_reverse_kl(PATHS[0], [DATUM], temperature=0.5).result()
    run.optim_step().result()

    assert output.loss == 0.75
    assert output.outputs[0].loss.tolist() == [0.75]
    (sent,) = api.bodies(KL)
    assert (sent["seq_id"], sent["reference_model_path"], sent["temperature"]) == (2, PATHS[0], 0.5)
    assert sent["data"][0]["target_tokens"]["dtype"] == "int64"
    assert sent["data"][0]["weights"] == {"data": [1.0, 0.5], "dtype": "float32", "shape": [2]}
    assert [body["seq_id"] for body in api.bodies("optim_step")] == [1, 3]


def test_a_reverse_kl_may_be_called_as_in_the_mint_sdk(api: FakeApi, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    wanted: dict[str, Any] = {"reference_model_path": PATHS[0], "data": [DATUM]}
    queued(api, KL, KL_ANSWER, times=2)

    async def call() -> mintx.ForwardBackwardReverseKLResponse:
        future = await mintx.forward_backward_reverse_kl_async(run, **wanted)
        return await future

    assert mintx.forward_backward_reverse_kl(run, **wanted).metrics == {"loss:sum": 0.75}
    assert asyncio.run(call()).metrics == {"loss:sum": 0.75}


def test_a_refused_reverse_kl_leaves_no_gap(api: FakeApi, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    api.answers[KL] = [refusal(400, "no such reference")]
    with pytest.raises(BadRequestError, match="no such reference"):
        run.forward_backward_reverse_kl(PATHS[0], [DATUM]).result()
    assert not api.passes["pass:1"].data


def test_an_interpolation_returns_the_path_of_its_weights(api: FakeApi, service: ServiceClient) -> None:
    result = {**MIXED, "coefficients": [0.5, 0.5]}
    queued(api, MIX, result, times=3)

    async def call() -> str:
        sent = mintx.interpolate_checkpoints_async(
            service, source_paths=PATHS, coefficients=[0.5, 0.5], output_path="mix"
        )
        return (await (await sent)).path

    assert service.interpolate_checkpoints(PATHS, [0.5, 0.5], "mix").result().path == MIXED["path"]
    plain = mintx.interpolate_checkpoints(service, source_paths=PATHS, coefficients=[0.5, 0.5], output_path="mix")
    assert plain.path == asyncio.run(call()) == MIXED["path"]
    assert api.bodies(MIX)[0]["output_path"] == "mix"


def test_a_refused_interpolation_raises_at_its_result(api: FakeApi, service: ServiceClient) -> None:
    api.answers[MIX] = [refusal(400, "of several base models")]
    future = service.interpolate_checkpoints(PATHS, [0.5, 0.5])
    with pytest.raises(BadRequestError, match="several base models"):
        future.result()
