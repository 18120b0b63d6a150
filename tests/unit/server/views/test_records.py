"""Records as shown to their owner and to other tenants, and the search of sessions."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.wire.rest import SessionSearchRequest
from cotrain_server.views.records import (
    ANOTHER_TENANT,
    checkpoint_of,
    cursor_at,
    matches,
    may_find,
    position_of,
    status_of,
    summary_of,
    text_by_name,
    training_run_of,
)
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WeightsRef
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord, RunState, SessionRecord
from cotrain_store.tenants.catalog import RunEntry
from cotrain_store.tenants.session_search import Cursor, SessionEntry, Stored

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


RECORD = SessionRecord(
    id=SessionId("s1"),
    tenant=ALICE,
    created_at=1_000.5,
    user_metadata={"recipe": "sft", "lr": 0.1},
    project_id="p1",
    display_name="Nightly SFT run",
)
ALIVE = SessionEntry(Cursor(1_000_500_000, "s1"), RECORD, is_alive=True, failed_run=None)
QUIET = replace(ALIVE, is_alive=False)
FINISHED = replace(QUIET, record=replace(RECORD, finished_at=2_000.0, finish_reason="errored"))
FAILED = replace(FINISHED, failed_run=RunId("s1:train:0"))


def search(**wanted: Any) -> SessionSearchRequest:
    return SessionSearchRequest.model_validate(wanted)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, True),
        ({"session_id": "s1"}, True),
        ({"session_id": "s2"}, False),
        ({"display_name": "sft NIGHT"}, True),
        ({"display_name": "sft weekly"}, False),
        ({"display_name": " "}, False),
        ({"session_id": "s2", "display_name": "nightly"}, True),
        ({"session_id": "s1", "display_name": "weekly"}, True),
        ({"user_metadata": {"recipe": "sft", "lr": "0.1"}}, True),
        ({"user_metadata": {"recipe": "sft", "seed": "1"}}, False),
        ({"project_ids": ["p0", "p1"]}, True),
        ({"project_ids": ["p0"]}, False),
        ({"project_ids": []}, False),
        ({"display_name": "nightly", "project_ids": ["p0"]}, False),
    ],
)
def test_a_session_is_found_by_its_properties(wanted: dict[str, Any], found: bool) -> None:
    assert matches(search(**wanted), ALIVE) is found


@pytest.mark.parametrize(
    ("entry", "status"), [(ALIVE, "active"), (QUIET, None), (FINISHED, "client_finished"), (FAILED, "failed")]
)
def test_a_session_has_the_worst_of_its_statuses(entry: SessionEntry, status: str | None) -> None:
    found = status_of(entry)
    assert (found.type if found else None) == status
    for asked in ("active", "cancelled", "failed", "client_finished"):
        assert matches(search(statuses=[{"type": asked}]), entry) is (asked == status)


def test_a_finished_session_is_found_by_its_reason() -> None:
    def asks(*reasons: str) -> bool:
        query = {"type": "client_finished", "reasons": list(reasons)}
        return matches(search(statuses=[{"type": "active"}, query]), FINISHED)

    assert asks("success", "errored")
    assert not asks("success", "interrupted")


def test_no_tenant_finds_the_sessions_of_another() -> None:
    assert may_find(search().owner, ALICE)
    assert may_find(search(owner={"type": "accessible"}).owner, ALICE)
    assert may_find(search(owner={"type": "user", "owner_urns": ["x", ALICE]}).owner, ALICE)
    assert not may_find(search(owner={"type": "user", "owner_urns": ["t-bob"]}).owner, ALICE)


def test_a_session_shows_its_storage_and_its_metadata_as_text() -> None:
    shown = summary_of(ALIVE, ALICE, Stored(2, 300))
    assert (shown.checkpoints_count, shown.checkpoint_storage_bytes) == (2, 300)
    assert shown.user_metadata == {"recipe": "sft", "lr": "0.1"}
    assert shown.created_at.timestamp() == RECORD.created_at


@given(st.integers(0, 2**52), st.from_regex(r"[0-9a-f]{32}", fullmatch=True))
def test_a_cursor_is_decoded_to_its_position(created_at_us: int, session: str) -> None:
    position = Cursor(created_at_us, session)
    sent = cursor_at(position).model_dump_json()
    assert position_of(type(cursor_at(position)).model_validate_json(sent)) == position
