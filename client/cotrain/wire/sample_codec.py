"""Parser of binary sample results, and conversion to JSON; without NumPy."""

from math import isnan
from typing import Literal

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from cotrain.errors import MalformedMessage, UnsupportedInput
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.routed_experts import RoutedExperts
from cotrain.wire.sampling import PolicySpan, SampledSequence, SampleResponse, TopK
from cotrain.wire.tensors import DType, TensorData, from_bytes

NOTHING = (0, -99999.0)
"""Value of the empty cells of a top-k matrix."""

_STOP_REASON: dict[int, Literal["length", "stop"]] = {wire.STOP_REASON_STOP: "stop", wire.STOP_REASON_LENGTH: "length"}
_ELEMENT: dict[int, tuple[str, DType]] = {wire.DTYPE_FLOAT32: ("f", "float32"), wire.DTYPE_INT64: ("q", "int64")}


def decode_sample_response(payload: bytes) -> SampleResponse:
    """Parse a serialized `SampleResponse`. Its sequences have no id yet. Raises MalformedMessage."""
    try:
        message = wire.SampleResponse.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage("this is not a SampleResponse") from error
    return SampleResponse(
        sequences=[_sequence(sequence) for sequence in message.sequences],
        prompt_logprobs=(
            [None if isnan(value) else value for value in from_bytes("f", message.prompt_logprobs)]
            if message.HasField("prompt_logprobs")
            else None
        ),
        topk_prompt_logprobs=(
            _topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
        ),
        target_prompt_logprobs=(
            _tensor(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None
        ),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_routed_experts=(
            _experts(message.prompt_routed_experts) if message.HasField("prompt_routed_experts") else None
        ),
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
        logprobs=(from_bytes("f", message.logprobs).tolist() if message.HasField("logprobs") else None),
        topk_logprobs=(_topk(message.topk_sampled_logprobs) if message.HasField("topk_sampled_logprobs") else None),
        routed_experts=(_experts(message.routed_experts) if message.HasField("routed_experts") else None),
        policy_spans=[_span(span) for span in message.policy_spans] or None,
    )


def _span(message: wire.PolicySpan) -> PolicySpan:
    return PolicySpan(
        start=message.start,
        end=message.end,
        training_run_id=message.training_run_id if message.HasField("training_run_id") else None,
        step=message.step if message.HasField("step") else None,
    )


def _topk(message: wire.TopkLogprobs) -> list[TopK | None]:
    """Parse two `[length, k]` matrices; a row without any token is None."""
    cells = list(zip(from_bytes("i", message.token_ids), from_bytes("f", message.logprobs), strict=False))
    if len(cells) != message.length * message.k:
        raise MalformedMessage(f"top-k of {message.length} rows and {message.k} columns is cut")
    rows = (cells[row * message.k : (row + 1) * message.k] for row in range(message.length))
    return [[cell for cell in row if cell != NOTHING] or None for row in rows]


def _experts(message: wire.Tensor) -> RoutedExperts:
    dtype: Literal["int8", "int16"] = "int8" if message.dtype == wire.DTYPE_INT8 else "int16"
    try:
        return RoutedExperts(data=message.dense, dtype=dtype, shape=tuple(message.shape))
    except ValidationError as error:
        raise MalformedMessage("routed_experts do not fill their shape") from error


def _tensor(message: wire.Tensor) -> TensorData:
    if message.dtype not in _ELEMENT:
        raise MalformedMessage(f"a tensor has the unknown element type {message.dtype}")
    typecode, dtype = _ELEMENT[message.dtype]
    is_sparse = message.HasField("sparse_csr")
    csr = message.sparse_csr
    try:
        return TensorData(
            data=from_bytes(typecode, csr.values if is_sparse else message.dense).tolist(),
            dtype=dtype,
            shape=list(message.shape),
            sparse_crow_indices=from_bytes("q", csr.crow_indices).tolist() if is_sparse else None,
            sparse_col_indices=from_bytes("q", csr.col_indices).tolist() if is_sparse else None,
        )
    except UnsupportedInput as error:
        raise MalformedMessage("a tensor does not fill its shape") from error
