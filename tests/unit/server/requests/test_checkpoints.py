"""Conversion of the fields of a save, a load or an interpolation to an op of the log."""

import json
from dataclasses import replace
from typing import Any

import pyrage
import pytest
from pydantic import ValidationError

from cotrain.wire.checkpoints import LoadWeightsRequest
from cotrain.wire.runs import InterpolateRequest
from cotrain_server.errors import Invalid
from cotrain_server.requests.checkpoints import check_mix, load_op, mix_body, mix_save_body, mixed_lora, save_op
from cotrain_server.requests.pass_ops import Op
from cotrain_server.requests.passes import read_fields
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WeightsRef, WorkerId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointKind, LoraSpec, RunRecord, WeightsRecord
from tests.support.http_api import POOL

RUN = "s:train:0"
LORA = LoraSpec(4, 0)
RECORD = RunRecord(RunId(RUN), TenantId("t"), SessionId("s"), POOL.id, POOL.base_model, LORA, 0.0)
WEIGHTS = WeightsRecord(
    WeightsRef("s:train:9:7"), RunId("s:train:9"), TenantId("t"), POOL.id, WorkerId("w"),
    POOL.base_model, LORA, 0.0, digest="d", has_optimizer=True,
)  # fmt: skip
RECIPIENT = str(pyrage.x25519.Identity.generate().to_public())
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAII/FTSpfrH/3Wm+puNcPrKu9xMS4G+8GOwRCrzhX2OAk a@b"
ALL_KINDS: list[CheckpointKind] = ["weights", "sampler_weights", "external_weights"]


def save(of: CheckpointKind = "sampler_weights", **fields: Any) -> Op:
    body = {"model_id": RUN, "seq_id": 3, **fields}
    return save_op(read_fields(json.dumps(body).encode()), RECORD, of)


def saved(op: Op) -> SaveRequest:
    assert op.kind is OpKind.SAVE, op.body
    return SaveRequest.parse(op.body)


def why(op: Op) -> str:
    assert op.kind is OpKind.REJECTED
    failure = json.loads(op.body)
    assert failure["category"] == "user"
    return str(failure["error"])


def load(weights: WeightsRecord = WEIGHTS, run: RunRecord = RECORD, **fields: Any) -> Op:
    body = {"model_id": RUN, "seq_id": 3, "path": "tinker://x", "optimizer": True, **fields}
    request = read_fields(json.dumps(body).encode())
    return load_op(request, LoadWeightsRequest.model_validate(body), weights, run)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_named_save_has_every_field_stored_with_the_weights(kind: CheckpointKind) -> None:
    metadata = {"renderer": "qwen3"}
    op = save(kind, path="step-10", ttl_seconds=7_200, user_metadata=metadata)
    assert saved(op) == SaveRequest(name="step-10", kind=kind, ttl_seconds=7_200, user_metadata=metadata)


def test_a_training_save_without_a_name_is_named_by_its_seq() -> None:
    assert saved(save("weights")).name == "000003"


def test_a_training_save_overwrites_only_on_request() -> None:
    assert saved(save("weights", path="a", overwrite=True)).overwrite
    assert not saved(save("weights", path="a")).overwrite


def test_a_save_without_a_name_makes_a_sampler_of_the_session() -> None:
    assert saved(save(sampling_session_seq_id=4)).sampler == "s:sample:4"


def test_a_save_during_training_is_a_snapshot() -> None:
    inflight = save(sampling_session_seq_id=4, kind="inflight")
    assert inflight.body == save(sampling_session_seq_id=4, kind="snapshot").body


@pytest.mark.parametrize("ttl_seconds", [None, 1])
def test_a_repeated_save_with_another_sampler_number_is_the_same(ttl_seconds: int | None) -> None:
    first, again = (save(sampling_session_seq_id=n, ttl_seconds=ttl_seconds) for n in (4, 5))
    assert first.digest == again.digest
    assert first.digest != save(sampling_session_seq_id=4, ttl_seconds=7_200).digest
    assert first.digest != save(path="4", ttl_seconds=ttl_seconds).digest


def test_saves_of_two_kinds_are_different_requests() -> None:
    assert len({save(kind, path="a").digest for kind in ALL_KINDS}) == 3


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", ["", "a/b", "../x", "a..b", ".a", "-a", "ä", "a b", "a\n", "x" * 129, "%2e", "a\0b"])
def test_a_name_that_is_not_a_valid_path_part_is_rejected(kind: CheckpointKind, name: str) -> None:
    assert why(save(kind, path=name)).startswith("path")


@pytest.mark.parametrize("name", ["a", "0", "step-10", "a.b_c-D", "x" * 128])
def test_any_other_name_is_accepted(name: str) -> None:
    assert saved(save(path=name)).name == name


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("sampler_weights", {}, "Exactly one of path and sampling_session_seq_id is needed."),
        (
            "sampler_weights",
            {"path": "a", "sampling_session_seq_id": 1},
            "Exactly one of path and sampling_session_seq_id is needed.",
        ),
        ("external_weights", {}, "path: Field required."),
        ("weights", {"path": "a", "ttl_seconds": 3_599}, "ttl_seconds must be between 3600 and 315360000 (10 years)."),
        (
            "external_weights",
            {"path": "a", "ttl_seconds": 315_360_001},
            "ttl_seconds must be between 3600 and 315360000 (10 years).",
        ),
        (
            "weights",
            {"path": "a", "user_metadata": {"a": "x" * 65_536}},
            "user_metadata may have at most 65536 bytes as JSON.",
        ),
        (
            "external_weights",
            {"path": "a", "age_encryption_recipients": [RECIPIENT, "age1x"]},
            "age_encryption_recipients[1] is neither an age X25519 recipient nor an SSH public key.",
        ),
        (
            "external_weights",
            {"path": "a", "age_encryption_recipients": []},
            "age_encryption_recipients must have 1 to 64 entries.",
        ),
    ],
)
def test_a_save_with_impossible_options_is_rejected(kind: CheckpointKind, fields: dict[str, Any], message: str) -> None:
    assert why(save(kind, **fields)) == message


def test_an_export_is_encrypted_to_age_recipients_and_ssh_keys() -> None:
    op = save("external_weights", path="a", age_encryption_recipients=[RECIPIENT, SSH_KEY])
    assert saved(op).age_recipients == (RECIPIENT, SSH_KEY)


def test_a_load_refers_to_the_current_weights_of_its_path() -> None:
    op = load()
    assert op.kind is OpKind.LOAD
    assert op.uses == (WEIGHTS.ref,)
    source = LoadSource(WEIGHTS.ref)
    assert LoadRequest.parse(op.body) == LoadRequest("tinker://x", (source,), optimizer=True)


def test_a_repeated_load_is_the_same_after_its_path_has_moved() -> None:
    moved = replace(WEIGHTS, ref=WeightsRef("s:train:9:8"))
    assert load().digest == load(moved).digest
    assert load().digest != load(optimizer=False).digest


def test_no_key_of_another_account_is_written_to_the_log() -> None:
    assert load(weights_access_token="tml-secret").body == load().body


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            replace(RECORD, lora=LoraSpec(8, 0)),
            "The checkpoint has rank 4, train_attn=True, train_mlp=True, train_unembed=True; the "
            "run has rank 8, train_attn=True, train_mlp=True, train_unembed=True.",
        ),
        (
            replace(RECORD, lora=LoraSpec(4, 0, train_mlp=False)),
            "The checkpoint has rank 4, train_attn=True, train_mlp=True, train_unembed=True; the "
            "run has rank 4, train_attn=True, train_mlp=False, train_unembed=True.",
        ),
        (replace(RECORD, base_model="other"), "The checkpoint is of base model tiny/model, the run of other."),
    ],
)
def test_a_run_loads_no_checkpoint_of_another_shape(run: RunRecord, message: str) -> None:
    with pytest.raises(Invalid) as refused:
        load(run=run)
    assert str(refused.value) == message


def test_runs_with_different_seeds_load_each_others_checkpoints() -> None:
    assert load(run=replace(RECORD, lora=LoraSpec(4, 1))).kind is OpKind.LOAD


def test_an_optimizer_state_of_another_alpha_is_not_loaded() -> None:
    run = replace(RECORD, lora=replace(RECORD.lora, alpha=64.0))
    with pytest.raises(Invalid, match="has alpha 32, the run 64: load it without its optimizer"):
        load(run=run)
    assert load(run=run, optimizer=False).kind is OpKind.LOAD


def test_a_missing_optimizer_state_is_not_loaded() -> None:
    bare = replace(WEIGHTS, has_optimizer=False)
    with pytest.raises(Invalid, match="no optimizer state"):
        load(bare)
    assert load(bare, optimizer=False).kind is OpKind.LOAD


PATHS = ["tinker://a:train:0/sampler_weights/one", "tinker://b:train:0/weights/two"]


def mix_request(**changes: Any) -> InterpolateRequest:
    return InterpolateRequest.model_validate(
        {"source_paths": PATHS, "coefficients": [0.9, 0.1], "output_path": "ema-0010", **changes}
    )


def source(ref: str, lora: LoraSpec, base_model: str = "tiny/model") -> WeightsRecord:
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
    source("a:train:0:3", LoraSpec(4, 7, train_unembed=False)),
    source("b:train:0:9", LoraSpec(8, 8, train_attn=False, train_mlp=False)),
]


def test_an_interpolation_loads_all_sources_into_a_new_adapter() -> None:
    load = LoadRequest.parse(mix_body(mix_request(), SOURCES))

    assert load.sources == (LoadSource(WeightsRef("a:train:0:3"), 0.9), LoadSource(WeightsRef("b:train:0:9"), 0.1))
    assert not load.optimizer
    assert load.lora == mixed_lora(SOURCES) == LoraSpec(rank=12, seed=7)


def test_the_save_of_an_interpolation_has_the_answer_of_mint_and_closes_the_run() -> None:
    save = SaveRequest.parse(mix_save_body(mix_request()))

    assert (save.name, save.kind, save.last) == ("ema-0010", "sampler_weights", True)
    assert save.answer == {
        "checkpoint_type": "sampler",
        "source_paths": PATHS,
        "coefficients": [0.9, 0.1],
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }


def test_the_server_chooses_a_name_if_the_client_has_none() -> None:
    assert SaveRequest.parse(mix_save_body(mix_request(output_path=None))).name == "interpolated"


@pytest.mark.parametrize("coefficient", [float("nan"), float("inf"), -1e7, None])
def test_a_coefficient_is_a_number_of_reasonable_size(coefficient: float | None) -> None:
    with pytest.raises(ValidationError, match=r"coefficients\.1"):
        mix_request(coefficients=[1.0, coefficient])


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
        check_mix(mix_request(**changes))


def test_a_valid_request_is_accepted() -> None:
    check_mix(mix_request())
    check_mix(mix_request(source_paths=PATHS[:1], coefficients=[1.0], output_path=None))


def test_checkpoints_of_two_base_models_cannot_be_mixed() -> None:
    foreign = source("c:train:0:1", LoraSpec(4, 7), "other/model")

    with pytest.raises(Invalid, match=r"several base models \(tiny/model, other/model\)"):
        mix_body(mix_request(), [SOURCES[0], foreign])
