"""Decoder of the body of a forward or forward_backward into arrays, and encoder of its output.

The API decodes a body once to check it, and the worker once to run it. The scheduler never does.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from cotrain.wire.constants import ROUTED_EXPERTS
from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies.images import BodyImage, ImageReader, UnusableImage
from cotrain_store.errors import MalformedBody

#: Maximum number of elements of a tensor. A larger shape is rejected before anything is allocated.
MAX_ELEMENTS = 1 << 26

_DTYPES: Mapping[int, np.dtype] = {
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
_TOKENS = -1  # the kind of tokens, next to the wire's types of tensors
_TYPES = {_TOKENS: np.dtype("<i4"), **_DTYPES, **_EXPERTS}
_SIZES = {kind: dtype.itemsize for kind, dtype in _DTYPES.items()}
#: Kind, first number, number after the last one, and shape.
_Range: TypeAlias = tuple[int, int, int, Sequence[int]]

#: Tensors that are decoded without a break, in about 10 ms.
BLOCK_TENSORS = 8_192


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
    work = decoding(request)
    while True:
        try:
            next(work)
        except StopIteration as end:
            body: PassBody = end.value
            return body


def decoding(request: wire_pb2.ForwardBackwardRequest) -> Generator[None, None, PassBody]:
    """Return the work of `decode_pass`, which yields after each BLOCK_TENSORS tensors."""
    # The SDK writes numbers to both maps and text only to the second one.
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    datums: list[DatumArrays] = []
    block = _Block()
    for index, datum in enumerate(request.data):
        block.add(index, datum)
        if block.tensors >= BLOCK_TENSORS:
            datums += block.datums()
            block = _Block()
            yield
    datums += block.datums()
    return PassBody(
        datums=tuple(datums), loss_fn=request.loss_fn, loss_config=config, forward_only=request.forward_only
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


class _Block:
    """Some neighbouring datums, whose numbers are converted at once. A conversion takes as long as a hundred numbers."""

    def __init__(self) -> None:
        self.tensors = 0
        self._raw: dict[int, list[bytes]] = {kind: [] for kind in _TYPES}
        self._ends = dict.fromkeys(_TYPES, 0)
        self._read: list[tuple[int, int, dict[str, _Range | np.ndarray], list[BodyImage]]] = []

    def add(self, index: int, datum: wire_pb2.Datum) -> None:
        """Add a datum. Raises MalformedBody."""
        images: list[BodyImage] = []
        start = stop = self._ends[_TOKENS]
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind == "encoded_text":
                raw = chunk.encoded_text.tokens
                if len(raw) % 4:
                    raise MalformedBody(f"datum {index}: model_input tokens are not a list of 32-bit integers.")
            elif kind == "image":
                images.append(_image(index, chunk.image, stop - start))
                raw = bytes(4 * images[-1].tokens)
            else:
                raise MalformedBody(
                    f"datum {index}: model_input has a chunk of type {kind or 'unknown'}; "
                    "send encoded_text, or image with a base model that reads images."
                )
            stop = self._append(_TOKENS, raw, 4)[2]
        tensors: dict[str, _Range | np.ndarray] = {}
        for name, tensor in datum.loss_fn_inputs.items():
            kind, raw, sides = tensor.dtype, tensor.dense, tensor.shape
            # Most tensors are plain. The checks of the others take twice as long.
            is_plain = len(sides) == 1 and raw and sides[0] * _SIZES.get(kind, 0) == len(raw)
            if is_plain and name != ROUTED_EXPERTS:
                tensors[name] = self._append(kind, raw, _SIZES[kind])
            else:
                tensors[name] = self._tensor(index, name, tensor)
        self.tensors += 1 + len(tensors)
        self._read.append((start, stop, tensors, images))

    def datums(self) -> Iterator[DatumArrays]:
        """Yield the datums, in order."""
        values = {kind: _widened(b"".join(raw), _TYPES[kind]) for kind, raw in self._raw.items()}
        for start, stop, tensors, images in self._read:
            inputs = {}
            for name, found in tensors.items():
                if isinstance(found, np.ndarray):
                    inputs[name] = found
                    continue
                kind, first, last, shape = found
                flat = values[kind][first:last]
                inputs[name] = flat.reshape(shape) if len(shape) > 1 else flat
            experts = inputs.pop(ROUTED_EXPERTS, None)
            yield DatumArrays(values[_TOKENS][start:stop], inputs, experts, images)

    def _append(self, kind: int, raw: bytes, size: int, shape: Sequence[int] = ()) -> _Range:
        start = self._ends[kind]
        stop = self._ends[kind] = start + len(raw) // size
        self._raw[kind].append(raw)
        return kind, start, stop, shape

    def _tensor(self, index: int, name: str, tensor: wire_pb2.Tensor) -> _Range | np.ndarray:
        kind, dtypes = tensor.dtype, _EXPERTS if name == ROUTED_EXPERTS else _DTYPES
        if kind not in dtypes:
            known = "int64 or float32" if dtypes is _DTYPES else "int8, int16, int32 or int64"
            raise MalformedBody(f"{_where(index, name)} has an unknown dtype; use {known}.")
        shape = tuple(tensor.shape)
        count = prod(shape)
        if (shape and min(shape) < 0) or count > MAX_ELEMENTS:
            where = _where(index, name)
            raise MalformedBody(f"{where} has an impossible shape {list(shape)}.")
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return _csr(_where(index, name), tensor.sparse_csr, dtypes[kind], shape)
        raw, size = tensor.dense, dtypes[kind].itemsize
        if len(raw) % size:
            raise MalformedBody(_broken(_where(index, name), raw, dtypes[kind]))
        if shape and count * size != len(raw):
            raise MalformedBody(f"{_where(index, name)} has {len(raw) // size} values for shape {list(shape)}.")
        return self._append(kind, raw, size, shape)


def _widened(raw: bytes, dtype: np.dtype) -> np.ndarray:
    values = np.frombuffer(raw, dtype)
    if dtype.itemsize < _SMALLEST:
        return values
    return values.astype(np.int64 if dtype.kind == "i" else np.float32)


def _where(index: int, name: str) -> str:
    return f"datum {index}: loss_fn_inputs.{name}"


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
                raise MalformedBody(f"{where}: override_dimensions is not supported. Resize the image.")
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


def _csr(where: str, sparse: wire_pb2.SparseCsr, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
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
        raise MalformedBody(_broken(where, raw, dtype))
    return _widened(raw, dtype)


def _broken(where: str, raw: bytes, dtype: np.dtype) -> str:
    return f"{where} has {len(raw)} bytes, not a whole number of {dtype.name}."
