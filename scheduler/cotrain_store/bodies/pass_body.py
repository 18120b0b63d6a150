"""Decoder of the body of a forward or forward_backward into arrays, and encoder of its output.

The API decodes a body once to check it, and the worker once to run it. The scheduler never does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from google.protobuf.message import DecodeError

from cotrain.wire.constants import ROUTED_EXPERTS
from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies.images import BodyImage, ImageReader, UnusableImage
from cotrain_store.errors import MalformedBody

#: Maximum number of elements of a tensor. A larger shape is rejected before anything is allocated.
MAX_ELEMENTS = 1 << 26

_DTYPES: dict[int, np.dtype] = {
    wire_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    wire_pb2.DTYPE_INT64: np.dtype("<i8"),
    wire_pb2.DTYPE_INT32: np.dtype("<i4"),
}
#: Types of experts. They are as small as possible, and stay so.
_EXPERTS: Mapping[int, np.dtype] = {
    wire_pb2.DTYPE_INT8: np.dtype("<i1"),
    wire_pb2.DTYPE_INT16: np.dtype("<i2"),
    wire_pb2.DTYPE_INT32: np.dtype("<i4"),
    wire_pb2.DTYPE_INT64: np.dtype("<i8"),
}
_SMALLEST = 4  # bytes of a number that a loss reads


@dataclass(frozen=True)
class DatumArrays:
    """Decoded datum: `tokens` int64 [n]; each input [n] or [n, K], int64 or float32."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    routed_experts: np.ndarray | None = None
    """Experts of each token, integers [n, layers, k]; None: the router chooses."""
    images: Sequence[BodyImage] = ()  # Images in order; the tokens within them are 0


@dataclass(frozen=True)
class PassBody:
    """Decoded forward or forward_backward request."""

    datums: tuple[DatumArrays, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool

    @property
    def num_tokens(self) -> int:
        """Total tokens of all datums."""
        return sum(len(datum.tokens) for datum in self.datums)


def parse_pass(body: bytes) -> wire_pb2.ForwardBackwardRequest:
    """Parse the message without reading its tensors; raises MalformedBody."""
    try:
        return wire_pb2.ForwardBackwardRequest.FromString(body)
    except DecodeError as broken:
        raise MalformedBody("The request is not a ForwardBackwardRequest message.") from broken


def decode_pass(request: wire_pb2.ForwardBackwardRequest) -> PassBody:
    """Decode every tensor of a request. Sparse tensors become dense, with 0 for missing entries. Raises MalformedBody:
    the message names the datum and the field.
    """
    # The SDK writes numbers to both maps and text only to the second one.
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassBody(
        datums=tuple(_datum(index, datum) for index, datum in enumerate(request.data)),
        loss_fn=request.loss_fn,
        loss_config=config,
        forward_only=request.forward_only,
    )


def encode_pass_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return log-probs per datum (float32, each [n] or [n, K]) and metrics as the wire's output."""
    output = wire_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(metrics)
    start = 0
    while start < len(logprobs):
        trailing = logprobs[start].shape[1:]
        stop = start + 1
        while stop < len(logprobs) and logprobs[stop].shape[1:] == trailing:
            stop += 1
        _add_record(output, logprobs[start:stop], trailing)
        start = stop
    return output.SerializeToString(deterministic=True)


def _add_record(
    output: wire_pb2.ForwardBackwardOutput, arrays: Sequence[np.ndarray], trailing: tuple[int, ...]
) -> None:
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.dtype = wire_pb2.DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)
    blobs = [np.ascontiguousarray(array, "<f4").tobytes() for array in arrays]
    field.data = b"".join(blobs)
    field.offsets = np.cumsum([0, *map(len, blobs)], dtype="<i8").tobytes()


def _datum(index: int, datum: wire_pb2.Datum) -> DatumArrays:
    images: list[BodyImage] = []
    chunks, length = [], 0
    for chunk in datum.model_input:
        if chunk.HasField("image"):
            images.append(_image(index, chunk.image, length))
            chunks.append(np.zeros(images[-1].tokens, np.int64))
        else:
            chunks.append(_chunk_tokens(index, chunk))
        length += len(chunks[-1])
    one = chunks[0] if chunks else np.zeros(0, np.int64)
    tokens = np.concatenate(chunks) if len(chunks) > 1 else one
    inputs = {
        name: _tensor(f"datum {index}: loss_fn_inputs.{name}", tensor)
        for name, tensor in datum.loss_fn_inputs.items()
        if name != ROUTED_EXPERTS
    }
    experts = None
    if ROUTED_EXPERTS in datum.loss_fn_inputs:
        tensor = datum.loss_fn_inputs[ROUTED_EXPERTS]
        experts = _tensor(f"datum {index}: loss_fn_inputs.{ROUTED_EXPERTS}", tensor, _EXPERTS)
    return DatumArrays(tokens, inputs, experts, images)


def has_images(request: wire_pb2.ForwardBackwardRequest) -> bool:
    """Return True if any chunk of a request is an image."""
    return any(chunk.HasField("image") for datum in request.data for chunk in datum.model_input)


def locate_images(request: wire_pb2.ForwardBackwardRequest, reader: ImageReader) -> None:
    """Check the images of a request, and write the grid of each one into it, where `decode_pass` reads it. Raises
    MalformedBody: the message names the datum and the image.
    """
    for index, datum in enumerate(request.data):
        for at, chunk in enumerate(datum.model_input):
            if not chunk.HasField("image"):
                continue
            image, where = chunk.image, f"data[{index}].model_input.chunks[{at}]"
            if image.HasField("override_dimensions"):
                raise MalformedBody(
                    f"{where}: override_dimensions is not supported. Resize the image."
                )
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            try:
                height, width = reader.read(image.data, image.format, expected)
            except UnusableImage as unusable:
                raise MalformedBody(f"{where} {unusable}") from unusable
            image.override_dimensions.height, image.override_dimensions.width = height, width


def _image(index: int, image: wire_pb2.ImageChunk, start: int) -> BodyImage:
    grid = image.override_dimensions
    if not 0 < grid.height * grid.width <= MAX_ELEMENTS:
        raise MalformedBody(f"datum {index}: model_input has an image that was not placed.")
    return BodyImage(start, grid.height, grid.width, image.data)


def _chunk_tokens(index: int, chunk: wire_pb2.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise MalformedBody(
            f"datum {index}: model_input has a chunk of type {kind or 'unknown'}; "
            "send encoded_text, or image with a base model that reads images."
        )
    raw = chunk.encoded_text.tokens
    if len(raw) % 4:
        raise MalformedBody(f"datum {index}: model_input tokens are not a list of 32-bit integers.")
    return np.frombuffer(raw, "<i4").astype(np.int64)


def _tensor(
    where: str, tensor: wire_pb2.Tensor, dtypes: Mapping[int, np.dtype] = _DTYPES
) -> np.ndarray:
    dtype = dtypes.get(tensor.dtype)
    if dtype is None:
        known = "int64 or float32" if dtypes is _DTYPES else "int8, int16, int32 or int64"
        raise MalformedBody(f"{where} has an unknown dtype; use {known}.")
    shape = tuple(tensor.shape)
    if any(side < 0 for side in shape) or prod(shape) > MAX_ELEMENTS:
        raise MalformedBody(f"{where} has an impossible shape {list(shape)}.")
    encoding = tensor.WhichOneof("encoding")
    if encoding == "sparse_csr":
        return _csr(where, tensor.sparse_csr, dtype, shape)
    values = _flat(where, tensor.dense, dtype)
    if not shape:
        return values
    if prod(shape) != values.size:
        raise MalformedBody(f"{where} has {values.size} values for shape {list(shape)}.")
    return values.reshape(shape)


def _csr(
    where: str, sparse: wire_pb2.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    if len(shape) != 2:
        raise MalformedBody(f"{where} is sparse and needs a 2-D shape, got {list(shape)}.")
    rows, columns = shape
    values = _flat(where, sparse.values, dtype)
    crow = _flat(where, sparse.crow_indices, np.dtype("<i8"))
    col = _flat(where, sparse.col_indices, np.dtype("<i8"))
    counts = np.diff(crow)
    consistent = (
        crow.size == rows + 1
        and crow[0] == 0
        and crow[-1] == values.size == col.size
        and crow.min() >= 0  # before the differences mean anything: they may overflow
        and (counts >= 0).all()
        and (col.size == 0 or (col.min() >= 0 and col.max() < columns))
    )
    if not consistent:
        raise MalformedBody(f"{where} has inconsistent CSR indices for shape {list(shape)}.")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


def _flat(where: str, raw: bytes, dtype: np.dtype) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise MalformedBody(f"{where} has {len(raw)} bytes, not a whole number of {dtype.name}.")
    values = np.frombuffer(raw, dtype)
    if dtype.itemsize < _SMALLEST:
        return values
    return values.astype(np.int64 if dtype.kind == "i" else np.float32)
