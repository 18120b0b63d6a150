from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_store.messages.ids import RequestId, RunId, TenantId, WorkerId, encode
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind, Step
from tests.support.draws import examples

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)
refs = st.one_of(st.just("inline"), st.from_regex(r"spool:[a-z0-9.-]+:\d+:\d+:[0-9a-f]{32}", fullmatch=True))
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
    allowances=st.dictionaries(names.map(RequestId), st.integers(1, 2**40)),
)


@given(ops)
def test_an_op_is_read_back_from_its_envelope(op: QueuedOp) -> None:
    assert QueuedOp.parse(op.run, op.seq, op.envelope()) == op


@given(steps)
@settings(max_examples=examples(30))
def test_a_step_of_any_version_is_read_back(step: Step) -> None:
    """Unknown fields are ignored. A step without allowances runs every pass to its end."""
    assert Step.parse(encode(step)) == step
    assert Step.parse(encode(step).encode()) == step
    raw = json.loads(encode(step))
    raw["a_field_of_tomorrow"] = {}
    for op in raw["ops"]:
        op["another"] = [1]
    assert Step.parse(json.dumps(raw)) == step
    del raw["allowances"]
    assert Step.parse(json.dumps(raw)) == replace(step, allowances={})


@given(st.builds(Result, st.sampled_from(ResultKind), st.binary(max_size=50)))
def test_a_result_is_read_back(result: Result) -> None:
    assert Result.decode(result.encode()) == result


def test_a_failure_has_a_category() -> None:
    failure = Result.failed("The rank is ü.", "user")
    assert failure.json() == {"error": "The rank is ü.", "category": "user"}
    assert failure.kind is ResultKind.FAILURE
