"""Results of a session search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.wire.rest import SessionSearchRequest
from cotrain_server.views.session_search import cursor_at, matches, may_find, position_of, status_of, summary_of
from cotrain_store.messages.ids import RunId, SessionId, TenantId
from cotrain_store.messages.runs import SessionRecord
from cotrain_store.tenants.lists import Cursor, SessionEntry, Stored

ALICE = TenantId("t-alice")
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
