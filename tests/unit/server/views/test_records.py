"""Visible parts of a record, for its owner and for other tenants."""

from __future__ import annotations

from dataclasses import replace

from cotrain_server.views.records import ANOTHER_TENANT, checkpoint_of, text_by_name, training_run_of
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WeightsRef
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord, RunState
from cotrain_store.tenants.catalog import RunEntry

ALICE, BOB = TenantId("t-alice"), TenantId("t-bob")
CHECKPOINT = CheckpointRecord(
    run=RunId("s:train:0"),
    tenant=ALICE,
    kind="weights",
    name="step-1",
    weights=WeightsRef("s:train:0:3"),
    base_model="tiny/model",
    created_at=200.0,
    expires_at=4_000.0,
    user_metadata={"step": 1},
    public=True,
    size=77,
)
RUN = RunRecord(
    id=RunId("s:train:0"),
    tenant=ALICE,
    session=SessionId("s"),
    pool=PoolId("p"),
    base_model="tiny/model",
    lora=LoraSpec(rank=8, seed=0),
    created_at=100.0,
    user_metadata={"renderer": "llama3", "private": ["x"]},
    state=RunState.FAILED,
    last_request_at=300.0,
)
ENTRY = RunEntry(RUN, CHECKPOINT, None)


def test_a_checkpoint_is_shown_by_kind_name_and_path() -> None:
    shown = checkpoint_of(CHECKPOINT)
    assert shown.model_dump(mode="json") == {
        "checkpoint_id": "weights/step-1",
        "checkpoint_type": "training",
        "time": "1970-01-01T00:03:20Z",
        "tinker_path": "tinker://s:train:0/weights/step-1",
        "size_bytes": 77,
        "public": True,
        "user_metadata": {"step": "1"},
        "expires_at": "1970-01-01T01:06:40Z",
        "base_model": None,
        "step": 0,
        "metrics": None,
    }


def test_metadata_that_is_not_text_is_shown_as_json() -> None:
    assert text_by_name({"a": "x", "b": [1], "c": None}) == {"a": "x", "b": "[1]", "c": "null"}
    assert text_by_name({}) is None


def test_an_owner_sees_the_whole_run() -> None:
    shown = training_run_of(ENTRY, ALICE)
    assert (shown.model_owner, shown.corrupted, shown.lora_rank) == (ALICE, True, 8)
    assert shown.last_request_time.timestamp() == 300.0
    assert shown.user_metadata == {"renderer": "llama3", "private": '["x"]'}


def test_other_tenants_see_only_the_published_checkpoint_of_a_run() -> None:
    shown = training_run_of(ENTRY, BOB)
    assert (shown.model_owner, shown.corrupted, shown.user_metadata) == (ANOTHER_TENANT, False, None)
    assert shown.last_request_time.timestamp() == CHECKPOINT.created_at
    assert ALICE not in shown.model_dump_json()


def test_a_rollback_is_shown_only_to_the_owner() -> None:
    before = training_run_of(ENTRY, ALICE)
    assert (before.weights_epoch, before.rolled_back_to) == (0, None)
    entry = replace(ENTRY, run=replace(RUN, weights_epoch=2, rolled_back_to=CHECKPOINT.path))
    own, others = training_run_of(entry, ALICE), training_run_of(entry, BOB)
    assert (own.weights_epoch, own.rolled_back_to) == (2, CHECKPOINT.path)
    assert (others.weights_epoch, others.rolled_back_to) == (0, None)
