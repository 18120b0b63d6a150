"""Conversion of a reverse KL request to an op of the log, and its refusals."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cotrain_server.errors import Unreadable
from cotrain_server.requests.reverse_kl import read_reverse_kl, reverse_kl_op
from cotrain_store.bodies.reverse_kl_body import decode_reverse_kl
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.ops import OpKind
from tests.support.http_api import POOL
from tests.support.kl_bodies import kl_body, kl_datum_body

REFERENCE = WeightsRef("other:train:0:3")


def op_of(body: dict[str, Any]) -> Any:
    return reverse_kl_op(read_reverse_kl(json.dumps(body).encode()), REFERENCE, POOL)


def refusal(body: dict[str, Any]) -> str:
    op = op_of(body)
    assert op.kind is OpKind.REJECTED
    assert op.uses == ()
    rejected = json.loads(op.body)
    assert rejected["category"] == "user"
    message: str = rejected["error"]
    return message


def with_datum(**changes: Any) -> dict[str, Any]:
    return kl_body("run", data=[kl_datum_body(), kl_datum_body(**changes)])


def test_a_valid_request_becomes_an_op_that_keeps_its_reference() -> None:
    op = op_of(kl_body("run", temperature=0.5))

    assert op.kind is OpKind.REVERSE_KL
    assert op.uses == (REFERENCE,)
    body = decode_reverse_kl(op.body)
    assert (body.reference, body.temperature) == (REFERENCE, 0.5)
    (datum,) = body.datums
    assert datum.student_context.tolist() == [1, 2, 3]
    assert datum.reference_context.tolist() == [4, 5]
    assert datum.targets.tolist() == [7, 8]
    assert datum.weights.tolist() == [1.0, 1.0]
    assert op.tokens == body.num_tokens == 4 + 3


def test_a_request_without_a_seq_is_unnumbered() -> None:
    assert read_reverse_kl(json.dumps(kl_body("run")).encode()).seq is None
    assert read_reverse_kl(json.dumps(kl_body("run", seq_id=4)).encode()).seq == 4


def test_a_request_with_the_base_model_keeps_no_reference() -> None:
    asked = read_reverse_kl(json.dumps(kl_body("run")).encode())
    assert reverse_kl_op(asked, None, POOL).uses == ()


@pytest.mark.parametrize("body", [b"[]", b"{", b"{}", b'{"model_id": "run", "seq_id": -1}'])
def test_a_request_without_a_run_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_reverse_kl(body)


EXPERTS = {"data": "AQIDBA==", "dtype": "int8", "shape": [4, 1, 1]}
LONG = {"chunks": [{"type": "encoded_text", "tokens": [1] * 64}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (kl_body("run", data=[]), "data is empty; send at least one datum."),
        (kl_body("run", temperature=0), "temperature must be positive and finite."),
        (kl_body("run", temperature=-1.5), "temperature must be positive and finite."),
        (kl_body("run", reference_model_path=7), "reference_model_path: Input should be a valid"),
        (with_datum(target_tokens={"data": [], "dtype": "int64"}), "data[1].target_tokens is empty."),
        (with_datum(weights={"data": [1.0], "dtype": "float32"}), "data[1].weights has 1 values for 2 target_tokens."),
        (with_datum(weights={"data": [1.0, 1e39], "dtype": "float32"}), "data[1].weights[1] is not finite."),
        (
            with_datum(weights={"data": [1, 1], "dtype": "int64"}),
            "data[1].weights must be of dtype float32, not int64.",
        ),
        (
            with_datum(target_tokens={"data": [7, 8], "shape": [1, 2], "dtype": "int64"}),
            "data[1].target_tokens must be a dense row; its shape is [1, 2].",
        ),
        (
            with_datum(target_tokens={"data": [7, 512], "dtype": "int64"}),
            "Target token id 512 at datum 1, position 1 is outside the vocabulary (0..511).",
        ),
        (
            with_datum(reference_input={"chunks": [{"type": "encoded_text", "tokens": [-1]}]}),
            "Reference token id -1 at datum 1, position 0 is outside the vocabulary (0..511).",
        ),
        (with_datum(student_input={"chunks": []}), "data[1].student_input is empty; the first target needs a context."),
        (
            with_datum(reference_input=LONG),
            "data[1].reference_input and target_tokens have 66 tokens; tiny/model reads 64 before",
        ),
        (with_datum(student_input={"chunks": [{"type": "image"}]}), "image"),
        (with_datum(weights=None), "data[1].weights: "),
        (with_datum(routed_experts=EXPERTS), "data[1].routed_experts: tiny/model has no experts"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(body: dict[str, Any], message: str) -> None:
    assert message in refusal(body)


def test_experts_of_the_student_are_kept_in_the_body() -> None:
    pool = replace(POOL, expert_choices=(1, 1, 7))
    for shape, message in (((4, 1, 1), ""), ((2, 1, 2), "has shape [2, 1, 2], but must be [4, 1, 1]")):
        body = with_datum(routed_experts=EXPERTS | {"shape": shape})
        op = reverse_kl_op(read_reverse_kl(json.dumps(body).encode()), None, pool)
        if message:
            assert message in json.loads(op.body)["error"]
        else:
            experts = decode_reverse_kl(op.body).datums[1].routed_experts
            assert experts is not None
            assert experts.tolist() == [[[1]], [[2]], [[3]], [[4]]]
