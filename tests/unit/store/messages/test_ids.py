"""Ids of requests, and records of earlier versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.ids import (
    RequestId,
    SessionId,
    decode,
    parse_sample,
    request_id,
    run_id,
    run_of,
    sample_id,
    sampler_id,
)
from cotrain_store.messages.runs import LoraSpec

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)


@given(names, st.integers(0, 2**31), st.integers(0, 100))
def test_a_request_id_contains_its_run_and_its_number(session: str, seq: int, model_seq: int) -> None:
    run = run_id(SessionId(session), model_seq)
    assert run_of(request_id(run, seq)) == run
    assert request_id(run, seq) == f"{session}:train:{model_seq}:{seq}"


def test_an_invalid_request_id_has_no_run() -> None:
    assert run_of(RequestId("nonsense")) == ""


def test_a_missing_field_has_its_default() -> None:
    assert decode(LoraSpec, {"rank": 2, "seed": 3, "new": 1}) == LoraSpec(rank=2, seed=3)
    with pytest.raises(TypeError):
        decode(LoraSpec, {"rank": 2})


@given(names, st.integers(0, 2**31), st.integers(0, 2**64 - 1))
def test_a_sample_request_id_contains_its_sampler_and_its_client_clone(session: str, number: int, seq: int) -> None:
    sampler = sampler_id(SessionId(session), number)
    name = parse_sample(sample_id(sampler, seq))
    if ":" in session or len(session) > 64:
        return
    assert name == (sampler, seq)
    assert name
    assert (name.session, name.clone) == (session, seq // 10**9)


@pytest.mark.parametrize(
    "request_name", ["", ":", "s:train:0:1", "s:sample:0", "s:sample:0:", "s:sample:0:1\n", "\ud800"]
)
def test_an_invalid_sample_request_id_has_no_sampler(request_name: str) -> None:
    assert parse_sample(request_name) is None
