"""Codec of passes and samples, compared with the official SDK's encoder and decoder."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as theirs
from tinker.proto import request_conv, response_conv, tinker_public_pb2

from cotrain import types as ours
from cotrain.errors import MalformedMessage, UnsupportedInput
from cotrain.wire.codec import (
    decode_pass_output,
    decode_sample_response,
    encode_datums,
    pass_output_to_json,
    sample_response_to_json,
    wrap_datums,
)
from cotrain.wire.proto import wire_pb2 as wire

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
tokens = st.integers(-(2**31), 2**31 - 1)
configs = st.none() | st.dictionaries(
    st.text("abc_", min_size=1), st.floats(allow_nan=False) | st.text("xyz"), max_size=3
)


@st.composite
def datum_fields(draw: st.DrawFn) -> tuple[list[int], dict[str, np.ndarray]]:
    sequence = draw(st.lists(tokens, min_size=1, max_size=6))
    length = len(sequence)
    weights = draw(st.lists(floats, min_size=length, max_size=length))
    return sequence, {
        "target_tokens": np.array(sequence, dtype=np.int64),
        "weights": np.array(weights, dtype=np.float32),
    }


@given(st.lists(datum_fields(), max_size=4), configs, st.integers(1, 2**31 - 1), st.booleans())
def test_a_request_encodes_as_the_official_sdk_encodes_it(
    fields: list[tuple[list[int], dict[str, Any]]],
    config: dict[str, float | str] | None,
    seq_id: int,
    forward_only: bool,
) -> None:
    their_message = _their_message(fields, config, seq_id)
    their_message.forward_only = forward_only
    our_data = [
        ours.Datum(model_input=ours.ModelInput.from_ints(sequence), loss_fn_inputs=inputs)
        for sequence, inputs in fields
    ]
    our_message = wrap_datums("m", seq_id, encode_datums(our_data), "ppo", config, forward_only=forward_only)
    assert _bytes(our_message) == _bytes(their_message)


def test_a_sparse_tensor_encodes_as_the_official_sdk_encodes_it() -> None:
    weights = torch.zeros(3, 40)
    weights[1, 7] = 0.5
    their_tensor = theirs.TensorData.from_torch_sparse(weights)
    assert their_tensor.sparse_crow_indices is not None
    our_tensor = ours.TensorData(
        data=their_tensor.data,
        dtype=their_tensor.dtype,
        shape=their_tensor.shape,
        sparse_crow_indices=their_tensor.sparse_crow_indices,
        sparse_col_indices=their_tensor.sparse_col_indices,
    )
    our_datum = ours.Datum(model_input=ours.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"weights": our_tensor})
    our_message = wrap_datums("m", 1, encode_datums([our_datum]), "ppo", None, forward_only=False)
    their_message = _their_message([([1, 2, 3], {"weights": their_tensor})], None, 1)
    assert _bytes(our_message) == _bytes(their_message)


def test_an_image_encodes_as_the_official_sdk_encodes_it() -> None:
    given: dict[str, Any] = {"data": b"\x89PNG", "format": "png", "expected_tokens": 12}
    messages = []
    for types in (ours, theirs):
        chunks = [types.ImageChunk(**given), types.EncodedTextChunk(tokens=[5])]
        datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={})
        messages.append(datum)
    our_message = wrap_datums("m", 1, encode_datums(messages[:1]), "ppo", None, forward_only=False)
    assert _bytes(our_message) == _bytes(_their_request(messages[1:], None, 1))


def test_input_that_is_not_a_datum_is_named() -> None:
    datum = ours.Datum(model_input=ours.ModelInput.from_ints([1]))
    with pytest.raises(UnsupportedInput, match=r"data\[1\] is a dict, not a Datum"):
        encode_datums([datum, {"model_input": 1}])  # type: ignore[list-item]  # deliberately wrong
    with pytest.raises(UnsupportedInput, match="data is one Datum; give a list of them"):
        encode_datums(datum)  # type: ignore[arg-type]  # deliberately wrong


def test_a_datum_that_is_not_text_is_named() -> None:
    text = ours.Datum(model_input=ours.ModelInput.from_ints([1]))
    audio = ours.Datum(model_input=ours.ModelInput(chunks=[ours.DmelChunk()]))
    with pytest.raises(UnsupportedInput, match=r"datum 1: .*dmel"):
        wrap_datums("m", 1, encode_datums([text, audio]), "ppo", None, forward_only=False)


@given(st.lists(st.lists(floats, max_size=5), max_size=4), st.integers(0, 4))
def test_a_result_in_two_records_decodes_as_the_official_sdk_decodes_it(columns: list[list[float]], cut: int) -> None:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="package:ArrayRecord", metrics={"loss:sum": 2.5})
    for part in (columns[:cut], columns[cut:]):
        _add_record(message, [np.array(column, dtype=np.float32) for column in part])
    payload = message.SerializeToString()
    _assert_same(decode_pass_output(payload), response_conv.deserialize_forward_backward_output(payload))


def test_rows_of_several_columns_keep_their_shape() -> None:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    _add_record(message, [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), np.float32)])
    message.loss_fn_outputs[0].fields["logprobs"].trailing_shape.append(2)
    payload = message.SerializeToString()
    output = decode_pass_output(payload)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
    _assert_same(output, response_conv.deserialize_forward_backward_output(payload))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (wire.DTYPE_INT32, np.array([-1, 2**31 - 1], dtype=np.int32)),
        (wire.DTYPE_INT64, np.array([-1, 2**40], dtype=np.int64)),
        (wire.DTYPE_BFLOAT16, torch.tensor([1.5, -2.0]).bfloat16().view(torch.int16).numpy()),
    ],
)
def test_narrow_elements_widen_as_the_official_sdk_widens_them(dtype: wire.DType, values: np.ndarray) -> None:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    _add_record(message, [values])
    message.loss_fn_outputs[0].fields["logprobs"].dtype = dtype
    payload = message.SerializeToString()
    _assert_same(decode_pass_output(payload), response_conv.deserialize_forward_backward_output(payload))


def test_a_result_as_json_is_readable_by_the_older_sdk() -> None:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 1.0})
    _add_record(message, [np.array([0.5], dtype=np.float32)])
    assert json.loads(pass_output_to_json(message.SerializeToString())) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [0.5], "dtype": "float32", "shape": [1]}}],
        "metrics": {"loss:sum": 1.0},
    }


def test_bytes_that_are_not_a_message_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode_pass_output(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": wire.DTYPE_UNSPECIFIED}, "element type"),
        ({"offsets": struct.pack("<2q", 0, 6)}, "not a whole array"),
        ({"offsets": struct.pack("<2q", 0, 400)}, "not a whole array"),
        ({"offsets": struct.pack("<2q", 4, 0)}, "not a whole array"),
        ({"offsets": struct.pack("<3q", 0, 4, 8)}, "2 arrays for 1 datums"),
        ({"offsets": b"123"}, "whole number of elements"),
    ],
)
def test_a_result_with_inconsistent_record_sizes_is_refused(changes: dict[str, Any], why: str) -> None:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    _add_record(message, [np.array([1, 2], dtype=np.float32)])
    for name, value in changes.items():
        setattr(message.loss_fn_outputs[0].fields["logprobs"], name, value)
    with pytest.raises(MalformedMessage, match=why):
        decode_pass_output(message.SerializeToString())


#: Messages of this product alone.
OWN = {"SweepPassRequest", "SweepRuns", "AdamSteps", "PolicySpan"}


@pytest.mark.parametrize("name", sorted({*wire.DESCRIPTOR.message_types_by_name} - OWN))
def test_every_message_has_the_fields_of_the_official_sdk(name: str) -> None:
    their = tinker_public_pb2.DESCRIPTOR.message_types_by_name[name]
    our = wire.DESCRIPTOR.message_types_by_name[name]
    assert {each for each in _shape(our) if each[1] < OURS} == _shape(their)


#: Number of the first field that the hosted service does not have.
OURS = 100


def _shape(descriptor: Any) -> set[tuple[Any, ...]]:
    return {(f.name, f.number, f.type, f.is_repeated, f.has_presence) for f in descriptor.fields}


def _their_message(
    fields: list[tuple[list[int], dict[str, Any]]], config: dict[str, float | str] | None, seq_id: int
) -> Any:
    data = [
        theirs.Datum(model_input=theirs.ModelInput.from_ints(sequence), loss_fn_inputs=inputs)
        for sequence, inputs in fields
    ]
    return _their_request(data, config, seq_id)


def _their_request(data: list[Any], config: dict[str, float | str] | None, seq_id: int) -> Any:
    content = theirs.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    return request_conv.forward_backward_request_to_proto(
        theirs.ForwardBackwardRequest(forward_backward_input=content, model_id="m", seq_id=seq_id)
    )


def _bytes(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString(deterministic=True)
    return serialized


def _add_record(message: wire.ForwardBackwardOutput, arrays: list[np.ndarray]) -> None:
    record = message.loss_fn_outputs.add(num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.dtype = wire.DTYPE_FLOAT32
    field.data = b"".join(array.tobytes() for array in arrays)
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    field.offsets = ends.tobytes()


def _assert_same(our: ours.ForwardBackwardOutput, their: Any) -> None:
    assert our.loss_fn_output_type == their.loss_fn_output_type
    assert our.metrics == their.metrics
    assert len(our.loss_fn_outputs) == len(their.loss_fn_outputs)
    for our_datum, their_datum in zip(our.loss_fn_outputs, their.loss_fn_outputs, strict=True):
        assert our_datum.keys() == their_datum.keys()
        for name, tensor in our_datum.items():
            assert tensor.dtype == their_datum[name].dtype
            np.testing.assert_array_equal(tensor.to_numpy(), their_datum[name].to_numpy())


scores = st.lists(st.floats(-100, 0, width=32), min_size=1, max_size=5)


def topk(rows: int, k: int, empty: int = 0) -> wire.TopkLogprobs:
    """Return matrices whose first `empty` rows are empty."""
    ids = np.arange(1, rows * k + 1, dtype=np.int32).reshape(rows, k)
    logprobs = -ids.astype(np.float32)
    ids[:empty], logprobs[:empty] = 0, -99999.0
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=rows)


def sequence(logprobs: list[float], **fields: Any) -> wire.SampledSequence:
    return wire.SampledSequence(
        tokens=np.arange(len(logprobs), dtype=np.int32).tobytes(),
        logprobs=np.array(logprobs, dtype=np.float32).tobytes(),
        **fields,
    )


@given(st.lists(scores, max_size=3), st.none() | scores, st.integers(0, 2), st.integers(1, 3))
def test_a_result_decodes_as_the_official_sdk_decodes_it(
    rows: list[list[float]], prompt: list[float] | None, empty: int, k: int
) -> None:
    message = wire.SampleResponse(prompt_cache_hit_tokens=3)
    for index, logprobs in enumerate(rows):
        message.sequences.append(
            sequence(
                logprobs, stop_reason=wire.StopReason.Name(index % 2), topk_sampled_logprobs=topk(len(logprobs), k)
            )
        )
    if prompt is not None:
        message.prompt_logprobs = np.array([np.nan, *prompt], dtype=np.float32).tobytes()
        message.topk_prompt_logprobs.CopyFrom(topk(4, k, empty))
    ours = decode_sample_response(message.SerializeToString())
    theirs = response_conv.deserialize_sample_response(message.SerializeToString())
    assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert ours.topk_prompt_logprobs == theirs.topk_prompt_logprobs
    assert ours.prompt_cache_hit_tokens == theirs.prompt_cache_hit_tokens
    for our, their in zip(ours.sequences, theirs.sequences, strict=True):
        assert (our.stop_reason, our.tokens) == (their.stop_reason, their.tokens)
        assert (our.logprobs, our.topk_logprobs) == (their.logprobs, their.topk_logprobs)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_topk_scores_decode_as_the_official_sdk_decodes_them(is_sparse: bool) -> None:
    tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=[2, 2])
    if is_sparse:
        tensor.sparse_csr.values = np.array([-1.5], dtype=np.float32).tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 0, 1], dtype=np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array([1], dtype=np.int64).tobytes()
    else:
        tensor.dense = np.array([0, 0, 0, -1.5], dtype=np.float32).tobytes()
    payload = wire.SampleResponse(target_prompt_logprobs=tensor).SerializeToString()
    ours = decode_sample_response(payload).target_prompt_logprobs
    theirs = response_conv.deserialize_sample_response(payload).target_prompt_logprobs
    assert ours is not None
    assert theirs is not None
    assert ours.tolist() == [[0, 0], [0, -1.5]] == theirs.to_numpy().tolist()
    assert ours.is_sparse == is_sparse


def test_an_empty_sequence_has_logprobs_of_length_0() -> None:
    message = wire.SampleResponse(sequences=[sequence([])])
    (decoded,) = decode_sample_response(message.SerializeToString()).sequences
    assert (decoded.tokens, decoded.logprobs) == ([], [])


def test_a_sample_as_json_is_readable_by_the_older_sdk() -> None:
    message = wire.SampleResponse(
        sequences=[sequence([-0.5], stop_reason=wire.STOP_REASON_LENGTH)],
        prompt_logprobs=np.array([np.nan, -1], dtype=np.float32).tobytes(),
        topk_prompt_logprobs=topk(2, 1, empty=1),
    )
    assert json.loads(sample_response_to_json(message.SerializeToString())) == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [0], "logprobs": [-0.5]}],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [[2, -2.0]]],
        "prompt_cache_hit_tokens": 0,
    }


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff\xff\xff", "not a SampleResponse"),
        (wire.SampleResponse(prompt_logprobs=b"123"), "whole number of elements"),
        (wire.SampleResponse(topk_prompt_logprobs=wire.TopkLogprobs(k=2, length=2)), "is cut"),
        (wire.SampleResponse(target_prompt_logprobs=wire.Tensor()), "element type"),
        (wire.SampleResponse(target_prompt_logprobs=wire.Tensor(dtype=wire.DTYPE_INT64, shape=[3])), "fill its shape"),
    ],
)
def test_bytes_that_are_not_a_result_are_refused(payload: Any, why: str) -> None:
    bytes_ = payload if isinstance(payload, bytes) else payload.SerializeToString()
    with pytest.raises(MalformedMessage, match=why):
        decode_sample_response(bytes_)
