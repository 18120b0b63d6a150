"""Request ids, and records of earlier versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.ids import RequestId, SessionId, decode, request_id, run_id, run_of
from cotrain_store.messages.runs import LoraSpec

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)


@given(names, st.integers(0, 2**31), st.integers(0, 100))
def test_a_request_id_contains_its_run_and_its_number(
    session: str, seq: int, model_seq: int
) -> None:
    run = run_id(SessionId(session), model_seq)
    assert run_of(request_id(run, seq)) == run
    assert request_id(run, seq) == f"{session}:train:{model_seq}:{seq}"


def test_an_invalid_request_id_has_no_run() -> None:
    assert run_of(RequestId("nonsense")) == ""


def test_a_missing_field_has_its_default() -> None:
    assert decode(LoraSpec, {"rank": 2, "seed": 3, "new": 1}) == LoraSpec(rank=2, seed=3)
    with pytest.raises(TypeError):
        decode(LoraSpec, {"rank": 2})
