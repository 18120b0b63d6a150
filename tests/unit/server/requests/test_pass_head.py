"""Binary passes: the run at the start, limits on their objects, and fields that are not read."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from bench.neighbours.attacks import empty_fields_body, tiny_datums_body
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams
from cotrain_server.errors import Invalid, Unreadable
from cotrain_server.parser import ChildProcess
from cotrain_server.requests import pass_head, pass_ops
from cotrain_server.requests.pass_head import HEAD_BYTES, HEAD_FIELDS, head_of, split_sweep
from cotrain_server.requests.pass_ops import (
    MAX_DATUMS,
    SMALL_PASS,
    Op,
    ParsedPass,
    canonical,
    digest_of,
    pass_op,
    pass_op_in_child,
)
from cotrain_server.requests.passes import read_binary_pass
from cotrain_server.requests.submission import read_sweep
from cotrain_store.bodies.pass_body import parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ops import OpKind
from tests.support.http_api import POOL

MIB = 1024**2


def message(datums: int = 3) -> wire.ForwardBackwardRequest:
    """Make a pass with every field that an SDK sends."""
    made = wire.ForwardBackwardRequest(model_id="s:train:0", seq_id=300, loss_fn="ppo", forward_only=True)
    made.loss_fn_config["clip_low_threshold"] = 0.5
    made.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    made.loss_fn_config_v2["name"].text = "x" * 200
    tokens = np.arange(200, dtype="<i4")
    for _ in range(datums):
        datum = made.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        image = datum.model_input.add().image
        image.data, image.format, image.expected_tokens = b"png", "png", 7
        image.override_dimensions.width = 1
        datum.model_input.add().dmel.dmel = b"sound"
        dense = datum.loss_fn_inputs["target_tokens"]
        dense.dtype, dense.dense = wire.DTYPE_INT32, tokens.tobytes()
        dense.shape.append(200)
        sparse = datum.loss_fn_inputs["weights"]
        sparse.dtype = wire.DTYPE_FLOAT32
        sparse.shape.extend([200, 2])
        sparse.sparse_csr.values = sparse.sparse_csr.crow_indices = b"1234"
        sparse.sparse_csr.col_indices = b""
    return made


def with_spans(made: wire.ForwardBackwardRequest) -> wire.ForwardBackwardRequest:
    for datum in made.data:
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
            spans.add().sampled_tokens.sequence_id = "r:0"
            spans.add().prompt_tokens.length = 3
    return made


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def inside(*tags: int, content: bytes) -> bytes:
    """Wrap content in messages, the last tag innermost."""
    for tag in reversed(tags):
        content = bytes([tag]) + varint(len(content)) + content
    return content


def trained(datums: int = 1) -> wire.ForwardBackwardRequest:
    """Make a pass that is valid, of one token per datum."""
    return parse_pass(zstandard.decompress(tiny_datums_body("r", datums)))


def op_of(body: bytes, *, forward_only: bool = False) -> Op:
    return pass_op(read_binary_pass(body, forward_only=forward_only), POOL)


def test_only_the_sampling_provenance_is_left_out() -> None:
    plain, spans = trained(), with_spans(trained())
    assert len(spans.SerializeToString()) > len(plain.SerializeToString())
    assert op_of(spans.SerializeToString()) == op_of(canonical(plain))


# Four unknown fields with two-byte tags: a number, 8 bytes, a text and 4 bytes.
UNKNOWN = b"\xf8\x07\xac\x02" + b"\xf9\x07" + bytes(8) + b"\xfa\x07\x02ab" + b"\xfd\x07" + bytes(4)


@pytest.mark.parametrize("tags", [(), (0x0A,), (0x0A, 0x0A), (0x12, 0x12)])
def test_unknown_fields_are_left_out_of_every_message(tags: tuple[int, ...]) -> None:
    plain, datum = trained(), trained().data[0].SerializeToString()
    plain.data.add().ParseFromString(datum + inside(*tags, content=b""))
    body = trained().SerializeToString() + inside(0x1A, content=datum + inside(*tags, content=UNKNOWN))
    assert parse_pass(body) != plain
    op = op_of(body + UNKNOWN)
    assert (op.body, op.digest) == (op_of(canonical(plain)).body, digest_of(canonical(plain)))


def test_sixteen_million_empty_datums_fail_in_another_process() -> None:
    """They take more memory there than it may have."""
    child = ChildProcess()
    head = wire.ForwardBackwardRequest(model_id="r", seq_id=1).SerializeToString()
    try:
        for count in (MAX_DATUMS + 1, 16_000_000):
            asked = read_binary_pass(head + b"\x1a\x00" * count, forward_only=False)
            assert (asked.model_id, asked.seq, asked.needs_child) == ("r", 1, True)
            assert child.run(pass_op_in_child, asked, POOL).kind is OpKind.REJECTED
    finally:
        child.stop()


@pytest.mark.parametrize(
    ("field", "tags"),
    [
        ("data", (0x1A,)),
        ("model_input", (0x1A, 0x0A)),
        ("loss_fn_inputs", (0x1A, 0x12)),
        ("loss_fn_config", (0x2A,)),
        ("loss_fn_config", (0x3A,)),
    ],
)
def test_every_repeated_field_has_a_limit(monkeypatch: pytest.MonkeyPatch, field: str, tags: tuple[int, ...]) -> None:
    monkeypatch.setattr(pass_ops, "MAX_SETTINGS", 20)
    monkeypatch.setattr(pass_ops, "MAX_DATUMS", 20 if field == "data" else 5)

    def error(many: int) -> str:
        keys = [inside(0x0A, content=b"%d" % number) if "loss_fn" in field else b"" for number in range(many)]
        named = (inside(tags[-1], content=key) for key in keys)
        body = trained(0).SerializeToString() + inside(*tags[:-1], content=b"".join(named))
        return str(json.loads(op_of(body).body)["error"])

    assert "one request holds at most" not in error(20)
    assert error(21).startswith(f"{field}: one request holds at most 20 ")


def test_a_shape_of_a_million_axes_is_refused_without_a_product() -> None:
    made = message(1)
    made.data[0].loss_fn_inputs["weights"].shape.extend([2**62] * 100_000)
    assert b"has 100002 axes. The limit is 8" in op_of(made.SerializeToString()).body


def test_bytes_that_are_not_a_message_are_refused() -> None:
    generator = random.Random(0)
    body = message(1).SerializeToString()
    cut = [body[:end] for end in range(len(body))]
    for _ in range(500):
        broken = bytearray(body)
        broken[generator.randrange(len(body))] = generator.randrange(256)
        cut.append(bytes(broken))
    for each in cut:
        with suppress(MalformedBody):
            assert len(head_of(each)) <= len(each)
        with suppress(MalformedBody):
            split_sweep(each)


@pytest.mark.parametrize("body", [b"\x0b", b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x00\x00"])
def test_groups_and_endless_lengths_are_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_binary_pass(body, forward_only=False)
    with pytest.raises(MalformedBody):
        head_of(body)


@pytest.mark.parametrize(
    "body",
    [b"\x0a\x00" * 200_000, b"\x30\x01" * 200_000, b"\x48\x01" * 200_000, b"\x2a\x00" * 200_000],
    ids=["without a run", "known", "unknown", "settings"],
)
def test_few_of_millions_of_fields_are_read_in_python(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    walked, fields = 0, pass_head._fields

    def counted(*args: Any) -> Iterator[tuple[int, int, int]]:
        nonlocal walked
        for field in fields(*args):
            walked += 1
            yield field

    monkeypatch.setattr(pass_head, "_fields", counted)
    with pytest.raises(Unreadable, match="model_id must come before the first datum"):
        read_binary_pass(body, forward_only=False)
    assert walked <= HEAD_FIELDS


def test_a_pass_of_millions_of_fields_names_its_run_first() -> None:
    head = message(0).SerializeToString()
    for field in (b"\x30\x01", b"\x48\x01", b"\x1a\x00", b"\x2a\x00"):
        read = read_binary_pass(head + field * 100_000, forward_only=False)
        assert (read.model_id, read.seq, read.needs_child) == ("s:train:0", 300, True)


def test_a_head_beyond_its_bounds_is_ignored() -> None:
    named = wire.ForwardBackwardRequest(model_id="r", seq_id=1).SerializeToString()
    assert head_of(named + b"\x1a\x00") == named
    assert head_of(b"\x30\x01" * HEAD_FIELDS + named) == b"\x30\x01" * HEAD_FIELDS
    assert head_of(inside(0x22, content=bytes(HEAD_BYTES)) + named) == b""


def test_a_small_pass_may_name_its_run_anywhere() -> None:
    named = wire.ForwardBackwardRequest(model_id="r", seq_id=1).SerializeToString()
    batch = trained()
    batch.ClearField("model_id")
    batch.ClearField("seq_id")
    read = read_binary_pass(batch.SerializeToString() + named, forward_only=False)
    assert (read.model_id, read.seq, read.needs_child) == ("r", 1, False)
    assert pass_op(read, POOL).kind is OpKind.FORWARD_BACKWARD


def test_a_large_pass_is_read_once_its_base_model_is_known() -> None:
    body = trained(4_000).SerializeToString()
    assert len(body) > SMALL_PASS
    asked = read_binary_pass(body, forward_only=True)
    assert (asked.needs_child, asked.model_id, asked.seq) == (True, "r", 1)
    op = pass_op(asked, POOL)
    assert (op.kind, op.tokens) == (OpKind.FORWARD, 4_000)
    few = read_binary_pass(trained(10).SerializeToString(), forward_only=True)
    assert not few.needs_child
    assert pass_op(few, POOL).tokens == 10


def test_a_small_pass_with_a_vast_sparse_tensor_is_not_expanded_in_the_event_loop() -> None:
    """12 KB had stopped it for 0.1 s."""
    made = trained()
    for tensor in made.data[0].loss_fn_inputs.values():
        tensor.shape[:] = [1, 1 << 23]
        tensor.sparse_csr.crow_indices = bytes(16)
    body = made.SerializeToString()
    assert len(body) < SMALL_PASS
    assert read_binary_pass(body, forward_only=False).needs_child


def test_a_pass_is_stored_as_it_was_sent() -> None:
    loss = wire.ForwardBackwardRequest(loss_fn="cross_entropy").SerializeToString()
    body = trained(2_500).SerializeToString()
    head = head_of(body)
    body = head + loss + body[len(head) : -len(loss)]  # not in the canonical order
    asked = read_binary_pass(body, forward_only=False)
    op = pass_op_in_child(asked, POOL)
    assert (op.body, op.tokens) == (b"", 2_500)
    assert pass_op(asked, POOL).body == body
    assert op.digest == digest_of(canonical(parse_pass(body)))
    for changed in (replace(asked, forward_only=True), replace(asked, body=body + b"\x78\x01")):
        op = pass_op_in_child(changed, POOL)
        assert parse_pass(op.body).forward_only == changed.forward_only
        assert op.digest == digest_of(op.body)


def test_a_large_pass_may_name_its_run_only_once() -> None:
    body = trained(4_000).SerializeToString()
    other = wire.ForwardBackwardRequest(model_id="other").SerializeToString()
    assert b"model_id and seq_id: given twice." in op_of(body + other).body
    assert b"not a ForwardBackwardRequest message" in op_of(body[:-1]).body


def test_a_pass_of_empty_fields_fails_alone() -> None:
    body = zstandard.decompress(empty_fields_body(2 * MIB), max_output_size=2 * MIB)
    op = pass_op(ParsedPass("r", 1, body), POOL)
    assert b"given twice" in op.body


BATCH = wire.ForwardBackwardRequest(loss_fn="cross_entropy").SerializeToString()
SWEEP: dict[str, Any] = {"prefix": "s:train:", "names": "1,2", "seq_ids": [3]}


def test_the_runs_of_a_sweep_share_what_they_have_in_common() -> None:
    adam = wire.AdamSteps(learning_rate=[0.5, 0.25], beta1=[0.5])
    runs = wire.SweepRuns(**SWEEP, adam=adam)
    sweep = read_sweep(wire.SweepPassRequest(runs=runs, pass_request=BATCH).SerializeToString())
    assert [(each.model_id, each.seq) for each in sweep.entries] == [
        ("s:train:1", 3), ("s:train:2", 3),
    ]  # fmt: skip
    steps = [json.loads(each.step.body) for each in sweep.entries if each.step]
    assert [(step["learning_rate"], step["beta1"]) for step in steps] == [(0.5, 0.5), (0.25, 0.5)]
    assert {step["beta2"] for step in steps} == {AdamParams().beta2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_ids": []}, r"runs\.seq_ids has 0 numbers, but must have 2, or 1"),
        ({"seq_ids": [1, 0]}, r"runs\[1\]\.seq_id must be 1 or more"),
        ({"names": "1,1"}, "each run may be named once"),
        ({"names": ",".join(map(str, range(65)))}, "at most 64 runs"),
        ({"names": "1" * 20_000}, "at most 64 runs"),
        ({"adam": wire.AdamSteps(eps=[1.0] * 3)}, r"runs\.adam\.eps has 3 numbers"),
    ],
)
def test_bad_runs_of_a_sweep_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    runs = wire.SweepRuns(**{**SWEEP, **changes})
    with pytest.raises((Invalid, Unreadable), match=message):
        read_sweep(wire.SweepPassRequest(runs=runs, pass_request=BATCH).SerializeToString())
