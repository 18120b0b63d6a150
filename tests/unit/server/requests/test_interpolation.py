from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cotrain.wire.runs import InterpolateRequest
from cotrain_server.errors import Invalid
from cotrain_server.requests.interpolation import check_mix, mix_body, mix_save_body, mixed_lora
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WeightsRef, WorkerId
from cotrain_store.messages.runs import LoraSpec, WeightsRecord

PATHS = ["tinker://a:train:0/sampler_weights/one", "tinker://b:train:0/weights/two"]


def asked(**changes: Any) -> InterpolateRequest:
    return InterpolateRequest.model_validate(
        {"source_paths": PATHS, "coefficients": [0.9, 0.1], "output_path": "ema-0010", **changes}
    )


def weights(ref: str, lora: LoraSpec, base_model: str = "tiny/model") -> WeightsRecord:
    return WeightsRecord(
        ref=WeightsRef(ref),
        run=RunId(ref.rpartition(":")[0]),
        tenant=TenantId("t"),
        pool=PoolId("p"),
        worker=WorkerId("w"),
        base_model=base_model,
        lora=lora,
        created_at=1.0,
    )


SOURCES = [
    weights("a:train:0:3", LoraSpec(4, 7, train_unembed=False)),
    weights("b:train:0:9", LoraSpec(8, 8, train_attn=False, train_mlp=False)),
]


def test_an_interpolation_loads_all_sources_into_a_new_adapter() -> None:
    load = LoadRequest.parse(mix_body(asked(), SOURCES))

    assert load.sources == (LoadSource(WeightsRef("a:train:0:3"), 0.9), LoadSource(WeightsRef("b:train:0:9"), 0.1))
    assert not load.optimizer
    assert load.lora == mixed_lora(SOURCES) == LoraSpec(rank=12, seed=7)


def test_its_save_has_the_answer_of_mint_and_closes_the_run() -> None:
    save = SaveRequest.parse(mix_save_body(asked()))

    assert (save.name, save.kind, save.last) == ("ema-0010", "sampler_weights", True)
    assert save.answer == {
        "checkpoint_type": "sampler",
        "source_paths": PATHS,
        "coefficients": [0.9, 0.1],
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }


def test_the_server_chooses_a_name_if_the_client_has_none() -> None:
    assert SaveRequest.parse(mix_save_body(asked(output_path=None))).name == "interpolated"


@pytest.mark.parametrize("coefficient", [float("nan"), float("inf"), -1e7, None])
def test_a_coefficient_is_a_number_of_reasonable_size(coefficient: float | None) -> None:
    with pytest.raises(ValidationError, match=r"coefficients\.1"):
        asked(coefficients=[1.0, coefficient])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_paths": [], "coefficients": []}, "source_paths must have 1 to 64 entries."),
        ({"coefficients": [1.0]}, "coefficients has 1 entries for 2 sources."),
        ({"output_path": "tinker://a:train:0/sampler_weights/x"}, "must be a plain name"),
        ({"output_path": "../x"}, "must be a plain name"),
        ({"output_path": ""}, "must be a name of 1 to 128"),
        ({"output_path": "a..b"}, "must be a name of 1 to 128"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_mix(asked(**changes))


def test_a_valid_request_is_accepted() -> None:
    check_mix(asked())
    check_mix(asked(source_paths=PATHS[:1], coefficients=[1.0], output_path=None))


def test_checkpoints_of_two_base_models_cannot_be_mixed() -> None:
    foreign = weights("c:train:0:1", LoraSpec(4, 7), "other/model")

    with pytest.raises(Invalid, match=r"several base models \(tiny/model, other/model\)"):
        mix_body(asked(), [SOURCES[0], foreign])
