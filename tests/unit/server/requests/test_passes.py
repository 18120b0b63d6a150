"""Conversion of the bytes of a training request to an op of the log."""

import json
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.wire.proto import wire_pb2
from cotrain_server.errors import Unreadable
from cotrain_server.requests import pass_ops
from cotrain_server.requests.pass_ops import Op, canonical, digest_of, pass_op
from cotrain_server.requests.passes import read_binary_pass, read_fields, read_json_pass, read_step, step_op
from cotrain_store.bodies.images import BodyImage
from cotrain_store.bodies.pass_body import decode_pass, parse_pass
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord
from tests.support.http_api import POOL, pass_body
from tests.support.pictures import RULES, picture

RUN = "s:train:0"


def json_op(forward_only: bool = False, seq: int = 1, **changes: Any) -> Op:
    body = json.dumps(pass_body(RUN, seq, **changes))
    if forward_only:
        body = body.replace("forward_backward_input", "forward_input")
    return pass_op(read_json_pass(body.encode(), forward_only=forward_only), POOL)


def message(**changes: Any) -> wire_pb2.ForwardBackwardRequest:
    return wire_pb2.ForwardBackwardRequest.FromString(json_op(**changes).body)


def binary_op(request: wire_pb2.ForwardBackwardRequest) -> Op:
    return pass_op(read_binary_pass(request.SerializeToString(), forward_only=False), POOL)


def step(**params: Any) -> Op:
    body = {"model_id": RUN, "seq_id": 2, "adam_params": params}
    return step_op(read_step(json.dumps(body).encode()))


def why(op: Op) -> str:
    assert op.kind is OpKind.REJECTED
    failure = json.loads(op.body)
    assert failure["category"] == "user"
    return str(failure["error"])


def test_json_and_protobuf_of_one_request_give_the_same_op() -> None:
    op = binary_op(message())  # its body is as it was sent
    assert replace(op, body=canonical(parse_pass(op.body))) == json_op()


def test_an_op_too_large_for_an_empty_queue_is_rejected_at_once() -> None:
    op = json_op()
    size = len(op.body)
    assert op.fitting(3, size) is op
    over = op.fitting(2, size)
    assert why(over).startswith("data has 3 tokens; of one tenant no more than 2 may wait at once")
    assert over.digest == op.digest
    assert why(op.fitting(3, size - 1)).startswith(f"data has {size} bytes; of one tenant")


def test_the_tokens_of_an_op_are_those_that_the_base_model_reads() -> None:
    assert json_op(tokens=[1, 2, 3, 4, 5]).tokens == 5


@pytest.mark.parametrize(("forward_only", "kind"), [(False, OpKind.FORWARD_BACKWARD), (True, OpKind.FORWARD)])
def test_forward_and_forward_backward_are_different_ops(forward_only: bool, kind: OpKind) -> None:
    op = json_op(forward_only=forward_only)
    assert op.kind is kind
    assert op.digest != json_op(forward_only=not forward_only).digest


def test_a_request_with_additional_provenance_has_the_same_digest() -> None:
    spanned = message()
    spanned.data[0].model_input_spans.add().prompt_tokens.sequence_id = "s"
    assert binary_op(spanned).digest == json_op().digest


def test_different_contents_have_different_digests() -> None:
    assert json_op(tokens=[1, 2, 3]).digest != json_op(tokens=[1, 2, 4]).digest


def test_a_repeated_invalid_request_has_the_same_digest() -> None:
    first, again = json_op(loss_fn="nope"), json_op(loss_fn="nope")
    assert first == again
    assert first.digest != json_op(loss_fn="nope2").digest


def test_a_request_without_a_loss_is_rejected_by_the_name_of_the_field() -> None:
    assert why(json_op(loss_fn=None)).startswith("forward_backward_input.loss_fn: ")


@pytest.mark.parametrize("token", [2**31, 2**63, True, 1.5, "1"])
def test_a_token_that_is_no_32_bit_integer_is_rejected(token: Any) -> None:
    body = pass_body(RUN, 1)
    body["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"] = [token]
    op = pass_op(read_json_pass(json.dumps(body).encode(), forward_only=False), POOL)
    assert "data[0].model_input.chunks[0]" in why(op)


def test_a_number_that_is_not_valid_json_is_rejected_too() -> None:
    body = json.dumps(pass_body(RUN, 1)).replace("[1.0, 1.0, 1.0]", "[1.0, NaN, 1.0]")
    op = pass_op(read_json_pass(body.encode(), forward_only=False), POOL)
    assert why(op) == "data[0].loss_fn_inputs.weights[1] is not finite."


def pictured(pool: PoolRecord, chunk: dict[str, Any], targets: int = 9) -> tuple[Op, str]:
    """Return the op of 3 tokens and an image, with the digest of its request."""
    body = pass_body(RUN, 1, tokens=[5] * targets)
    chunks = body["forward_backward_input"]["data"][0]["model_input"]["chunks"]
    chunks[0]["tokens"] = [5] * 3
    chunks.append({"type": "image", "format": "png", **chunk})
    read = read_json_pass(json.dumps(body).encode(), forward_only=False)
    assert read.needs_child != bool(read.refusal)
    return pass_op(read, pool), digest_of(read.body)


def test_an_image_counts_its_tokens_and_is_stored_with_the_op() -> None:
    data, pool = picture(0, 24, 16), replace(POOL, images=RULES)
    encoded = b64encode(data).decode()
    chunk = {"data": encoded, "expected_tokens": 6}
    op, digest = pictured(pool, chunk)
    (datum,) = decode_pass(parse_pass(op.body)).datums
    assert (op.kind, op.tokens, op.digest) == (OpKind.FORWARD_BACKWARD, 9, digest)
    assert datum.tokens.tolist() == [5] * 3 + [0] * 6
    assert datum.images == [BodyImage(3, 2, 3, data)]

    where = "data[0].model_input.chunks[1]"
    for its_pool, changes, targets, message in (
        (pool, {"expected_tokens": 7}, 9, f"{where} has expected_tokens=7, but 6 tokens with this "),
        (pool, {"data": encoded[:-40]}, 9, f"{where} cannot be decoded: "),
        (pool, {"data": "%"}, 9, f"{where}.image.data: "),
        (pool, {}, 8, "data[0].loss_fn_inputs.target_tokens has shape [8], but the input has 9 tokens."),
        (POOL, {}, 9, "data has an image, but tiny/model reads text only here. Send encoded_text."),
        (pool, {"type": "dmel"}, 9, "datum 0: chunks of type dmel cannot be read here"),
    ):
        refused, _ = pictured(its_pool, {**chunk, **changes}, targets)
        assert message in why(refused)

    # A client may not claim a grid.
    assert f"{where}: override_dimensions is not supported" in why(
        pass_op(read_binary_pass(op.body, forward_only=False), pool)
    )


def test_the_dense_size_of_sparse_tensors_is_limited() -> None:
    request = message()
    target = request.data[0].loss_fn_inputs["target_tokens"]
    target.sparse_csr.crow_indices = bytes(8 * 4)
    del target.shape[:]
    target.shape.extend([3, 1 << 25])
    assert "may span at most" in why(binary_op(request))


def test_the_inputs_of_a_datum_and_the_sparse_tensors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to decode a pass grows with its tensors, which plans do not count."""
    request = message()
    for at in range(pass_ops.MAX_INPUTS):
        request.data[0].loss_fn_inputs[f"extra{at}"].shape.append(0)
    found = len(request.data[0].loss_fn_inputs)
    assert why(binary_op(request)) == (
        f"data[0].loss_fn_inputs has {found} tensors. The limit is 32. Send only those that the loss reads."
    )
    request = message()
    request.data[0].loss_fn_inputs["target_tokens"].sparse_csr.crow_indices = bytes(8 * 4)
    monkeypatch.setattr(pass_ops, "MAX_SPARSE_TENSORS", 0)
    assert "target_tokens: one request may have at most 0 sparse tensors" in why(binary_op(request))


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b'{"model_id": 1}', b"{", b"\xff", b"null"])
def test_a_request_without_a_run_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_json_pass(body, forward_only=False)


@pytest.mark.parametrize("seq", [0, -1, 2**31, 2**63, True, "1", 1.0, None])
def test_a_seq_must_be_an_integer_of_at_least_1(seq: Any) -> None:
    with pytest.raises(Unreadable, match="seq_id"):
        read_fields(json.dumps({"model_id": RUN, "seq_id": seq}).encode())


def test_a_message_without_a_run_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="model_id"):
        read_binary_pass(b"", forward_only=False)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(body: bytes) -> None:
    for read in (read_binary_pass, read_json_pass):
        with suppress(Unreadable):
            pass_op(read(body, forward_only=False), POOL)


def test_a_step_has_its_parameters() -> None:
    op = step(learning_rate=0.5)
    assert op.kind is OpKind.OPTIM_STEP
    assert json.loads(op.body) == {
        "learning_rate": 0.5,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": -1},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0},
        {"eps": -1e-8},
        {"weight_decay": -1},
        {"grad_clip_norm": float("nan")},
    ],
)
def test_a_step_with_a_parameter_out_of_range_is_rejected_by_name(params: dict[str, float]) -> None:
    assert f"adam_params.{next(iter(params))}" in why(step(**params))


def test_another_optimizer_is_rejected() -> None:
    body = {"model_id": RUN, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}
    assert "dimuon is not served" in why(step_op(read_step(json.dumps(body).encode())))


def test_a_step_of_muon_has_the_engine_s_fields() -> None:
    body = {"model_id": RUN, "seq_id": 1, "optimizer_params": {"type": "muon", "momentum": 0.8}}
    op = step_op(read_step(json.dumps(body).encode()))
    assert json.loads(op.body) == {
        "type": "muon", "learning_rate": 1e-4, "beta1": 0.8, "beta2": 0.0, "eps": 1e-7,
        "weight_decay": 0.0, "grad_clip_norm": 0.0,
    }  # fmt: skip
    body |= {"adam_params": {}}
    assert "send adam_params for AdamW" in why(step_op(read_step(json.dumps(body).encode())))
