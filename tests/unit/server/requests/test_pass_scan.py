"""Scan of a binary pass before parsing: fields are counted, and unused ones are dropped unparsed."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from bench.neighbours.attacks import empty_datums_body, tiny_datums_body
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams
from cotrain_server.errors import Invalid, Unreadable
from cotrain_server.requests import pass_scan
from cotrain_server.requests.pass_ops import _canonical, digest_of, pass_op, pass_op_apart
from cotrain_server.requests.pass_scan import (
    HEAD_BYTES,
    HEAD_FIELDS,
    LIMITS,
    MAX_DATUMS,
    TooManyObjects,
    head_of,
    strip_unknown_fields,
)
from cotrain_server.requests.passes import FEW_FIELDS, read_binary_pass
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


def test_requests_of_sdks_are_unchanged() -> None:
    body = message().SerializeToString()
    assert strip_unknown_fields(body) is body


def test_only_the_sampling_provenance_is_left_out() -> None:
    plain, spans = message(), with_spans(message())
    assert len(spans.SerializeToString()) > len(plain.SerializeToString())
    lean = wire.ForwardBackwardRequest.FromString(strip_unknown_fields(spans.SerializeToString()))
    assert lean == plain


# Four unknown fields with two-byte tags: a number, 8 bytes, a text and 4 bytes.
UNKNOWN = b"\xf8\x07\xac\x02" + b"\xf9\x07" + bytes(8) + b"\xfa\x07\x02ab" + b"\xfd\x07" + bytes(4)


@pytest.mark.parametrize(
    "tags", [(), (0x1A,), (0x1A, 0x0A), (0x1A, 0x0A, 0x0A), (0x1A, 0x12, 0x12), (0x2A,), (0x3A, 0x12)]
)
def test_unknown_fields_are_left_out_of_every_message(tags: tuple[int, ...]) -> None:
    body = message().SerializeToString()
    lean = strip_unknown_fields(inside(*tags, content=UNKNOWN) + body + inside(*tags, content=UNKNOWN))
    assert lean == inside(*tags, content=b"") + body + inside(*tags, content=b"")


@pytest.mark.parametrize("tags", [(), (0x1A,), (0x1A, 0x12, 0x12)])
def test_unknown_fields_are_counted_too(monkeypatch: pytest.MonkeyPatch, tags: tuple[int, ...]) -> None:
    monkeypatch.setattr(pass_scan, "LIMITS", {**LIMITS, "field": 50})
    with pytest.raises(TooManyObjects, match=r"^field: one request holds at most 50 fields"):
        strip_unknown_fields(inside(*tags, content=b"\xf8\x07\x01" * 51))


def test_four_million_empty_datums_are_refused_before_parsing() -> None:
    """Measured: 771 bytes on the wire took 1.5 GB and two minutes."""
    body = zstandard.decompress(empty_datums_body(), max_output_size=16 * MIB)
    assert body.count(b"\x1a\x00") == 4_000_000
    tracemalloc.start()
    try:
        refused = read_binary_pass(body, forward_only=False)
        # No memory except the input of its digest.
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
    assert refused.message is None
    assert (refused.model_id, refused.seq) == ("a", 1)
    op = pass_op(refused, POOL)
    assert op.kind is OpKind.REJECTED
    assert f"data: one request holds at most {MAX_DATUMS} datums".encode() in op.body


@pytest.mark.parametrize(
    ("field", "tags"),
    [
        ("model_input", (0x1A, 0x0A)),
        ("loss_fn_inputs", (0x1A, 0x12)),
        ("loss_fn_config", (0x2A,)),
        ("loss_fn_config", (0x3A,)),
    ],
)
def test_every_repeated_field_has_a_limit(monkeypatch: pytest.MonkeyPatch, field: str, tags: tuple[int, ...]) -> None:
    monkeypatch.setattr(pass_scan, "LIMITS", {**LIMITS, field: 5})
    many, tag = 6, bytes([tags[-1], 0])
    strip_unknown_fields(inside(*tags[:-1], content=tag * (many - 1)))
    with pytest.raises(TooManyObjects, match=f"^{field}: one request holds at most 5 "):
        strip_unknown_fields(inside(*tags[:-1], content=tag * many))


@pytest.mark.parametrize("axes", [b"\x22\x05" + bytes(5), b"\x20\x01" * 5])
def test_the_number_of_axes_of_a_shape_is_limited(monkeypatch: pytest.MonkeyPatch, axes: bytes) -> None:
    monkeypatch.setattr(pass_scan, "LIMITS", {**LIMITS, "shape": 4})
    with pytest.raises(TooManyObjects, match=r"^shape: "):
        strip_unknown_fields(inside(0x1A, 0x12, 0x12, content=axes))


def test_a_shape_of_a_million_axes_is_refused_without_a_product() -> None:
    made = message(1)
    made.data[0].loss_fn_inputs["weights"].shape.extend([2**62] * 100_000)
    op = pass_op(read_binary_pass(made.SerializeToString(), forward_only=False), POOL)
    assert b"has 100002 axes. The limit is 8" in op.body


def test_a_truncated_message_is_malformed_or_another_message() -> None:
    body = message(1).SerializeToString()
    for end in range(len(body)):
        try:
            lean = strip_unknown_fields(body[:end])
        except MalformedBody:
            continue
        assert lean == body[:end]
        wire.ForwardBackwardRequest.FromString(lean)


def test_bytes_that_are_not_a_message_are_never_accepted_as_one() -> None:
    generator = random.Random(0)
    body = bytearray(message(1).SerializeToString())
    for _ in range(500):
        broken = bytearray(body)
        broken[generator.randrange(len(body))] = generator.randrange(256)
        try:
            lean = strip_unknown_fields(bytes(broken))
        except MalformedBody:
            continue
        assert len(lean) <= len(broken)


@pytest.mark.parametrize("body", [b"\x0b", b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x00\x00"])
def test_groups_and_endless_lengths_are_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_binary_pass(body, forward_only=False)


@pytest.mark.parametrize(
    "body",
    [b"\x0a\x00" * 200_000, b"\x30\x01" * 200_000, b"\x48\x01" * 200_000, b"\x2a\x00" * 200_000],
    ids=["without a run", "known", "unknown", "settings"],
)
def test_few_of_millions_of_fields_are_scanned_in_python(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    walked, fields = 0, pass_scan._fields

    def counted(*args: Any) -> Iterator[tuple[int, int, int, int]]:
        nonlocal walked
        for field in fields(*args):
            walked += 1
            yield field

    monkeypatch.setattr(pass_scan, "_fields", counted)
    with pytest.raises(Unreadable, match="model_id must come before the first datum"):
        read_binary_pass(body, forward_only=False)
    assert walked <= FEW_FIELDS + HEAD_FIELDS + 2


def test_a_pass_of_millions_of_fields_names_its_run_first() -> None:
    head = message(0).SerializeToString()
    for field in (b"\x30\x01", b"\x48\x01", b"\x1a\x00", b"\x2a\x00"):
        read = read_binary_pass(head + field * 100_000, forward_only=False)
        assert (read.model_id, read.seq, read.is_read) == ("s:train:0", 300, False)


def test_a_head_beyond_its_bounds_is_ignored() -> None:
    named = wire.ForwardBackwardRequest(model_id="r", seq_id=1).SerializeToString()
    assert head_of(named + b"\x1a\x00") == named
    assert head_of(b"\x30\x01" * HEAD_FIELDS + named) == b"\x30\x01" * HEAD_FIELDS
    assert head_of(inside(0x22, content=bytes(HEAD_BYTES)) + named) == b""


def test_a_pass_of_many_fields_is_read_once_its_base_model_is_known() -> None:
    body = zstandard.decompress(tiny_datums_body("r", 4_000))
    asked = read_binary_pass(body, forward_only=True)
    assert (asked.is_read, asked.message, asked.model_id, asked.seq) == (False, None, "r", 1)
    op = pass_op(asked, POOL)
    assert (op.kind, op.tokens) == (OpKind.FORWARD, 4_000)
    few = read_binary_pass(zstandard.decompress(tiny_datums_body("r", 10)), forward_only=True)
    assert few.is_read
    assert pass_op(few, POOL).tokens == 10


def test_a_pass_of_many_fields_is_stored_as_it_was_sent() -> None:
    loss = wire.ForwardBackwardRequest(loss_fn="cross_entropy").SerializeToString()
    body = zstandard.decompress(tiny_datums_body("r", 2_500))
    head = head_of(body)
    body = head + loss + body[len(head) : -len(loss)]  # not in the canonical order
    asked = read_binary_pass(body, forward_only=False)
    op, is_sent = pass_op_apart(asked, POOL)
    assert (is_sent, op.body, op.tokens) == (True, b"", 2_500)
    assert pass_op(asked, POOL).body == body
    assert op.digest == digest_of(_canonical(parse_pass(body)))
    for changed in (replace(asked, forward_only=True), replace(asked, content=body + b"\x78\x01")):
        op, is_sent = pass_op_apart(changed, POOL)
        assert (is_sent, parse_pass(op.body).forward_only) == (False, changed.forward_only)
        assert op.digest == digest_of(op.body)


def test_a_pass_of_many_fields_may_name_its_run_only_once() -> None:
    body = zstandard.decompress(tiny_datums_body("r", 4_000))
    other = wire.ForwardBackwardRequest(model_id="other").SerializeToString()
    op = pass_op(read_binary_pass(body + other, forward_only=False), POOL)
    assert b"model_id and seq_id: given twice." in op.body
    cut = pass_op(read_binary_pass(body[:-1], forward_only=False), POOL)
    assert b"not a ForwardBackwardRequest message" in cut.body


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
