"""Codec of the binary messages of `proto/wire.proto`: passes, their results, and samples, without NumPy.

It encodes arrays as bytes, but does not check the inputs of a loss or the token ids.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isnan, prod
from typing import Any, Literal, TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from cotrain.errors import MalformedMessage, UnsupportedInput
from cotrain.wire.constants import ROUTED_EXPERTS
from cotrain.wire.datums import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInputChunk,
    cannot_read,
    datums_of,
)
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.sampling import PolicySpan, SampledSequence, SampleResponse, TopK
from cotrain.wire.tensors import DType, RoutedExperts, TensorData, from_bytes, to_bytes

T = TypeVar("T")

PROTOBUF = "application/x-protobuf"
"""Media type of all these messages."""

_DTYPE_ON_WIRE: dict[DType, wire.DType] = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64}
_DTYPE_BY_NUMBER: dict[int, DType] = {number: dtype for dtype, number in _DTYPE_ON_WIRE.items()}
_DTYPE_OF_EXPERTS: dict[str, wire.DType] = {"int8": wire.DTYPE_INT8, "int16": wire.DTYPE_INT16}
_TYPECODE: dict[DType, str] = {"float32": "f", "int64": "q"}
_ELEMENT_OF_ARRAY: dict[int, tuple[str, DType]] = {
    wire.DTYPE_FLOAT32: ("f", "float32"),
    wire.DTYPE_BFLOAT16: ("H", "float32"),
    wire.DTYPE_INT64: ("q", "int64"),
    wire.DTYPE_INT32: ("i", "int64"),
}

_STOP_REASON: dict[int, Literal["length", "stop"]] = {wire.STOP_REASON_STOP: "stop", wire.STOP_REASON_LENGTH: "length"}
_EMPTY_CELL = (0, -99999.0)
"""Value of the empty cells of a top-k matrix."""


# ---- Requests of passes ---------------------------------------------------------------------------


def encode_datums(data: Sequence[Datum]) -> list[wire.Datum]:
    """Encode every datum. Raises UnsupportedInput, which names the datum, if it is invalid or not text."""
    return [_encode_datum(datum, index) for index, datum in enumerate(datums_of(data))]


def wrap_datums(
    model_id: str,
    seq_id: int,
    datums: Iterable[wire.Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
) -> wire.ForwardBackwardRequest:
    """Build the message of a forward or forward_backward over encoded datums.

    Equal arguments give equal bytes under `SerializeToString(deterministic=True)`.
    """
    message = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=datums, loss_fn=loss_fn, forward_only=forward_only
    )
    for name, value in (loss_fn_config or {}).items():
        _set_config(message, name, value)
    return message


def _set_config(message: wire.ForwardBackwardRequest, name: str, value: float | str) -> None:
    if isinstance(value, str):
        message.loss_fn_config_v2[name].text = value
        return
    # Numbers go into both maps, for older and newer servers.
    message.loss_fn_config[name] = value
    message.loss_fn_config_v2[name].number = value


def _encode_datum(datum: Datum, index: int) -> wire.Datum:
    message = wire.Datum()
    for chunk in datum.model_input.chunks:
        added = message.model_input.add()
        if isinstance(chunk, ImageChunk):
            added.image.data, added.image.format = chunk.data, chunk.format
            if chunk.expected_tokens is not None:
                added.image.expected_tokens = chunk.expected_tokens
        else:
            added.encoded_text.tokens = to_bytes("i", _tokens_of(chunk, index))
    for name, tensor in datum.loss_fn_inputs.items():
        _fill_tensor(message.loss_fn_inputs[name], tensor)
    if datum.routed_experts is not None:
        experts = message.loss_fn_inputs[ROUTED_EXPERTS]
        experts.dtype = _DTYPE_OF_EXPERTS[datum.routed_experts.dtype]
        experts.shape.extend(datum.routed_experts.shape)
        experts.dense = datum.routed_experts.data
    return message


def _tokens_of(chunk: ModelInputChunk, index: int) -> Sequence[int]:
    if isinstance(chunk, EncodedTextChunk):
        return chunk.tokens
    raise UnsupportedInput(f"datum {index}: {cannot_read(chunk)}")


def _fill_tensor(message: wire.Tensor, tensor: TensorData) -> None:
    message.dtype = _DTYPE_ON_WIRE[tensor.dtype]
    message.shape.extend(tensor.dense_shape)
    values = to_bytes(_TYPECODE[tensor.dtype], tensor.data)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = to_bytes("q", tensor.sparse_crow_indices)
    message.sparse_csr.col_indices = to_bytes("q", tensor.sparse_col_indices)


# ---- Results of passes ----------------------------------------------------------------------------


def decode_pass_output(payload: bytes) -> ForwardBackwardOutput:
    """Parse a serialized `ForwardBackwardOutput`, in one or several records.

    `int32` widens to `int64` and `bfloat16` to `float32`. Raises MalformedMessage.
    """
    try:
        message = wire.ForwardBackwardOutput.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage("this is not a ForwardBackwardOutput") from error
    return ForwardBackwardOutput(
        loss_fn_output_type=message.loss_fn_output_type.rsplit(":", 1)[-1] or "ArrayRecord",
        loss_fn_outputs=[outputs for record in message.loss_fn_outputs for outputs in _split_record(record)],
        metrics=dict(message.metrics),
    )


def pass_output_to_json(payload: bytes) -> bytes:
    """Rewrite a serialized `ForwardBackwardOutput` as JSON for older clients."""
    return decode_pass_output(payload).model_dump_json(exclude_none=True).encode()


def _split_record(record: wire.ArrayRecord) -> Iterator[dict[str, TensorData]]:
    columns = {name: list(_split_batch(name, batch)) for name, batch in record.fields.items()}
    for name, column in columns.items():
        if len(column) != record.num_datums:
            raise MalformedMessage(f"{name} has {len(column)} arrays for {record.num_datums} datums")
    for index in range(record.num_datums):
        yield {name: column[index] for name, column in columns.items()}


def _split_batch(name: str, batch: wire.BatchedTensor) -> Iterator[TensorData]:
    if batch.dtype not in _ELEMENT_OF_ARRAY:
        raise MalformedMessage(f"{name} has the unknown element type {batch.dtype}")
    typecode, dtype = _ELEMENT_OF_ARRAY[batch.dtype]
    trailing = list(batch.trailing_shape)
    row_bytes = array(typecode).itemsize * prod(trailing)
    for start, end in pairwise(from_bytes("q", batch.offsets)):
        if not 0 <= start <= end <= len(batch.data) or row_bytes <= 0 or (end - start) % row_bytes:
            raise MalformedMessage(f"{name} is cut at {start}:{end}, which is not a whole array")
        values = from_bytes(typecode, batch.data[start:end])
        if batch.dtype == wire.DTYPE_BFLOAT16:
            # A bfloat16 is the upper half of the float32 of the same value.
            values = from_bytes("f", to_bytes("I", [half << 16 for half in values]))
        shape = [(end - start) // row_bytes, *trailing]
        yield TensorData(data=values.tolist(), dtype=dtype, shape=shape)


# ---- Results of samples ---------------------------------------------------------------------------


def decode_sample_response(payload: bytes) -> SampleResponse:
    """Parse a serialized `SampleResponse`. Its sequences have no id yet. Raises MalformedMessage."""
    try:
        message = wire.SampleResponse.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage("this is not a SampleResponse") from error
    return SampleResponse(
        sequences=[_sequence(sequence) for sequence in message.sequences],
        prompt_logprobs=_optional(message, "prompt_logprobs", _prompt_logprobs),
        topk_prompt_logprobs=_optional(message, "topk_prompt_logprobs", _topk),
        target_prompt_logprobs=_optional(message, "target_prompt_logprobs", _tensor),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_routed_experts=_optional(message, "prompt_routed_experts", _experts),
    )


def sample_response_to_json(payload: bytes) -> bytes:
    """Rewrite a serialized `SampleResponse` as JSON for older clients."""
    return decode_sample_response(payload).model_dump_json(exclude_none=True).encode()


def _sequence(message: wire.SampledSequence) -> SampledSequence:
    if message.stop_reason not in _STOP_REASON:
        raise MalformedMessage(f"{message.stop_reason} is no reason to stop")
    return SampledSequence(
        stop_reason=_STOP_REASON[message.stop_reason],
        tokens=from_bytes("i", message.tokens).tolist(),
        logprobs=_optional(message, "logprobs", lambda values: from_bytes("f", values).tolist()),
        topk_logprobs=_optional(message, "topk_sampled_logprobs", _topk),
        routed_experts=_optional(message, "routed_experts", _experts),
        policy_spans=[_span(span) for span in message.policy_spans] or None,
    )


def _optional(message: Message, field: str, read: Callable[[Any], T]) -> T | None:
    """Read a field of a message; None if the message has none."""
    return read(getattr(message, field)) if message.HasField(field) else None


def _prompt_logprobs(values: bytes) -> list[float | None]:
    return [None if isnan(value) else value for value in from_bytes("f", values)]


def _span(message: wire.PolicySpan) -> PolicySpan:
    return PolicySpan(
        start=message.start,
        end=message.end,
        training_run_id=_optional(message, "training_run_id", str),
        step=_optional(message, "step", int),
    )


def _topk(message: wire.TopkLogprobs) -> list[TopK | None]:
    """Parse two `[length, k]` matrices; a row without any token is None."""
    cells = list(zip(from_bytes("i", message.token_ids), from_bytes("f", message.logprobs), strict=False))
    if len(cells) != message.length * message.k:
        raise MalformedMessage(f"top-k of {message.length} rows and {message.k} columns is cut")
    rows = (cells[row * message.k : (row + 1) * message.k] for row in range(message.length))
    return [[cell for cell in row if cell != _EMPTY_CELL] or None for row in rows]


def _experts(message: wire.Tensor) -> RoutedExperts:
    dtype: Literal["int8", "int16"] = "int8" if message.dtype == wire.DTYPE_INT8 else "int16"
    try:
        return RoutedExperts(data=message.dense, dtype=dtype, shape=tuple(message.shape))
    except ValidationError as error:
        raise MalformedMessage("routed_experts do not fill their shape") from error


def _tensor(message: wire.Tensor) -> TensorData:
    dtype = _DTYPE_BY_NUMBER.get(message.dtype)
    if dtype is None:
        raise MalformedMessage(f"a tensor has the unknown element type {message.dtype}")
    is_sparse = message.HasField("sparse_csr")
    csr = message.sparse_csr
    try:
        return TensorData(
            data=from_bytes(_TYPECODE[dtype], csr.values if is_sparse else message.dense).tolist(),
            dtype=dtype,
            shape=list(message.shape),
            sparse_crow_indices=from_bytes("q", csr.crow_indices).tolist() if is_sparse else None,
            sparse_col_indices=from_bytes("q", csr.col_indices).tolist() if is_sparse else None,
        )
    except UnsupportedInput as error:
        raise MalformedMessage("a tensor does not fill its shape") from error
