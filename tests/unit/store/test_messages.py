from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.encoding import decode, encode
from cotrain_store.messages.ids import (
    RequestId,
    RunId,
    SessionId,
    TenantId,
    WeightsRef,
    WorkerId,
    request_id,
    run_id,
    run_of,
    sample_id,
    sampler_id,
)
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.pools import PoolRecord
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.saves import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.weights import external_folder
from cotrain_store.sample_ends import parse_sample

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)
refs = st.one_of(
    st.just("inline"), st.from_regex(r"spool:[a-z0-9.-]+:\d+:\d+:[0-9a-f]{32}", fullmatch=True)
)
ops = st.builds(
    QueuedOp,
    run=names.map(RunId),
    seq=st.integers(0, 2**31),
    kind=st.sampled_from(OpKind),
    tokens=st.integers(0, 2**40),
    ref=refs,
    size=st.integers(0, 2**40),
    accepted_at=st.floats(0, 1e12),
)
steps = st.builds(
    Step,
    cycle=st.integers(1, 2**53),
    worker=names.map(WorkerId),
    ops=st.lists(ops, max_size=4).map(tuple),
    planned_at=st.floats(0, 1e12),
    tenant_by_run=st.dictionaries(names.map(RunId), names.map(TenantId)),
)


@given(ops)
def test_an_op_is_read_back_from_its_envelope(op: QueuedOp) -> None:
    assert QueuedOp.parse(op.run, op.seq, op.envelope()) == op


@given(steps)
def test_a_step_is_read_back_to_the_last_bit(step: Step) -> None:
    assert Step.parse(encode(step)) == step
    assert Step.parse(encode(step).encode()) == step


@given(steps)
def test_fields_of_another_version_are_ignored(step: Step) -> None:
    raw = json.loads(encode(step))
    raw["a_field_of_tomorrow"] = {}
    for op in raw["ops"]:
        op["another"] = [1]
    assert Step.parse(json.dumps(raw)) == step


specs = st.builds(LoraSpec, rank=st.integers(1, 256), seed=st.integers(0, 2**31))
saves = st.builds(
    SaveRequest,
    name=st.none() | names,
    kind=st.sampled_from(["weights", "sampler_weights", "external_weights"]),
    overwrite=st.booleans(),
    ttl_seconds=st.none() | st.integers(1, 10**9),
    user_metadata=st.dictionaries(names, names),
    age_recipients=st.lists(names).map(tuple),
    answer=st.dictionaries(names, st.lists(st.floats(-1, 1))),
    last=st.booleans(),
)
sources = st.builds(LoadSource, ref=names.map(WeightsRef), coefficient=st.floats(-2, 2))
loads = st.builds(
    LoadRequest,
    path=names,
    sources=st.lists(sources, min_size=1, max_size=3).map(tuple),
    optimizer=st.booleans(),
    lora=st.none() | specs,
)


@given(saves)
def test_a_save_is_read_back(save: SaveRequest) -> None:
    assert SaveRequest.parse(encode(save).encode()) == save


@given(loads)
def test_a_load_is_read_back(load: LoadRequest) -> None:
    assert LoadRequest.parse(encode(load).encode()) == load


def test_what_a_save_does_not_say_takes_its_default() -> None:
    assert SaveRequest.parse(b'{"name": "x"}') == SaveRequest(name="x")


@given(names, names)
def test_weights_of_their_own_have_a_folder_of_their_own(one: str, other: str) -> None:
    folders = external_folder(WeightsRef(one)), external_folder(WeightsRef(other))
    assert (folders[0] == folders[1]) == (one == other)
    assert "/" not in folders[0]


def test_a_field_that_is_not_there_yet_takes_its_default() -> None:
    assert decode(LoraSpec, {"rank": 2, "seed": 3, "new": 1}) == LoraSpec(rank=2, seed=3)
    with pytest.raises(TypeError):
        decode(LoraSpec, {"rank": 2})


def test_records_of_the_version_before_are_read() -> None:
    """A pool that an older worker wrote: it cannot sample, and says so."""
    fields = {
        "id": "p", "base_model": "m", "architecture": "Q", "vocab_size": 5, "context_length": 9,
        "max_rank": 8, "num_parameters": 1, "device": "cpu", "dtype": "float32",
        "numerics_id": "", "tokens_per_s": 1.0,
    }  # fmt: skip
    pool = decode(PoolRecord, fields)
    assert (pool.eos_token_ids, pool.tokenizer) == ((), "")
    assert (pool.max_sequence_tokens, pool.sampler) == (0, "")


@given(names, st.integers(0, 2**31), st.integers(0, 2**64 - 1))
def test_a_sample_request_names_its_sampler_and_the_copy_of_its_client(
    session: str, number: int, seq: int
) -> None:
    sampler = sampler_id(SessionId(session), number)
    name = parse_sample(sample_id(sampler, seq))
    if ":" in session or len(session) > 64:
        return
    assert name == (sampler, seq)
    assert name
    assert (name.session, name.clone) == (session, seq // 10**9)


@pytest.mark.parametrize(
    "request_name",
    ["", ":", "s:train:0:1", "s:sample:0", "s:sample:0:", "s:sample:0:1\n", "\ud800"],
)
def test_what_is_no_sample_request_names_no_sampler(request_name: str) -> None:
    assert parse_sample(request_name) is None


@given(st.builds(Result, st.sampled_from(ResultKind), st.binary(max_size=50)))
def test_a_result_is_read_back(result: Result) -> None:
    assert Result.unpack(result.pack()) == result


def test_a_failure_says_who_can_act_on_it() -> None:
    failure = Result.failed("The rank is ü.", "user")
    assert failure.json() == {"error": "The rank is ü.", "category": "user"}
    assert failure.kind is ResultKind.FAILURE


@given(names, st.integers(0, 2**31), st.integers(0, 100))
def test_a_request_names_its_run_and_its_place(session: str, seq: int, model_seq: int) -> None:
    run = run_id(SessionId(session), model_seq)
    assert run_of(request_id(run, seq)) == run
    assert request_id(run, seq) == f"{session}:train:{model_seq}:{seq}"


def test_what_is_not_a_request_names_no_run() -> None:
    assert run_of(RequestId("nonsense")) == ""
