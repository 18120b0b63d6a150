"""Arrays on the wire: TensorData and RoutedExperts, and their conversion from lists, NumPy arrays and torch tensors.

NumPy and torch are not imported: an array is any object with `dtype`, `shape`, `reshape()` and `tolist()`.
"""

from __future__ import annotations

import reprlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, chain, pairwise
from math import prod
from numbers import Integral
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from cotrain.errors import MalformedMessage, UnsupportedInput
from cotrain.wire.model import Listed, OneLine, in_a_sentence

__all__ = ["RoutedExperts", "TensorData"]

DType = Literal["int64", "float32"]
Int64 = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**31)]

_READ: dict[str, TypeAdapter[list[Any]]] = {
    "int64": TypeAdapter(list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]),
    "float32": TypeAdapter(list[float]),
}
"""Parsers of numbers from callers. They also accept NumPy and torch scalars, and whole floats as integers."""
_TYPECODE_OF_EXPERTS = {"int8": "b", "int16": "h"}


class TensorData(OneLine):
    """Array of `int64` or `float32`: dense in C order, or a CSR matrix of its non-zero entries.

    `data` may be a flat or nested list, a NumPy array or a torch tensor. Without `shape`, a dense
    array has the shape of `data`. Both `sparse_*` fields together make it CSR. Then `data` contains only the
    listed values, and `shape` must be `[rows, columns]`. Raises UnsupportedInput for anything else.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    data: Listed[Int64] | Listed[float]
    dtype: DType
    shape: Listed[Size] | None = None
    sparse_crow_indices: Listed[Size] | None = None
    sparse_col_indices: Listed[Size] | None = None

    def __init__(
        self,
        data: Any = None,
        dtype: DType | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype not in _READ:
            raise UnsupportedInput(f"dtype is {dtype!r}: it must be 'int64' or 'float32'")
        flat, found = numbers_and_shape(() if data is None else data, dtype)
        is_sparse = sparse_crow_indices is not None or sparse_col_indices is not None
        if shape is None and len(found) != 1 and not is_sparse:
            shape = found
        try:
            super().__init__(
                data=flat,
                dtype=dtype,
                shape=_sizes("shape", shape),
                sparse_crow_indices=_sizes("sparse_crow_indices", sparse_crow_indices),
                sparse_col_indices=_sizes("sparse_col_indices", sparse_col_indices),
            )
        except ValidationError as refused:
            raise UnsupportedInput(in_a_sentence(refused)) from None

    # Only for callers: pydantic parses wire messages without this `__init__`, strictly and faster.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # of pydantic itself

    @classmethod
    def of(cls, values: Any, dtype: DType | None = None) -> TensorData:
        """Return a dense array from nested lists, or from any object with `shape` and `tolist()`.

        Without `dtype`, whole numbers become `int64` and all others `float32`. Raises UnsupportedInput
        if nested lists are ragged, or contain other types.
        """
        dtype = dtype or ("int64" if _are_whole(values) else "float32")
        flat, shape = numbers_and_shape(values, dtype)
        return cls(data=flat, dtype=dtype, shape=shape)

    @classmethod
    def from_numpy(cls, array: Any) -> TensorData:
        """Return a dense array from a NumPy array."""
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        """Return a dense array from a torch tensor on any device; copies it to the host."""
        return cls.of(tensor)

    @classmethod
    def from_torch_sparse(cls, tensor: Any, pad_value: int = 0) -> TensorData:
        """Return a CSR matrix of a 2-D torch tensor if that is smaller, else a dense array.

        Entries equal to `pad_value` are left out.
        """
        dense = cls.of(tensor)
        if len(dense.dense_shape) != 2:
            return dense
        kept = [[(column, value) for column, value in enumerate(row) if value != pad_value] for row in dense.tolist()]
        listed = list(chain.from_iterable(kept))
        if len(kept) + 1 + 2 * len(listed) >= len(dense.data):
            return dense
        return cls(
            data=[value for _, value in listed],
            dtype=dense.dtype,
            shape=dense.shape,
            sparse_crow_indices=[0, *accumulate(map(len, kept))],
            sparse_col_indices=[column for column, _ in listed],
        )

    @property
    def is_sparse(self) -> bool:
        """True for a CSR matrix."""
        return self.sparse_crow_indices is not None

    @property
    def dense_shape(self) -> list[int]:
        """Shape of the array, `[len(data)]` if it was not passed."""
        return [len(self.data)] if self.shape is None else self.shape

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Return the array as nested lists, one level per dimension.

        Entries that a CSR matrix does not list become `pad_value`, as in `to_numpy` and `to_torch`.
        """
        return _nest(self._dense(pad_value), self.dense_shape)

    def to_numpy(self, pad_value: int = 0) -> Any:
        """Return the array as a NumPy array; needs NumPy."""
        # Imported by name, because this package depends on neither NumPy nor torch.
        numpy = import_module("numpy")
        return numpy.array(self._dense(pad_value), dtype=self.dtype).reshape(self.dense_shape)

    def to_torch(self, pad_value: int = 0) -> Any:
        """Return the array as a torch tensor on the host; needs torch."""
        torch = import_module("torch")
        flat = torch.tensor(self._dense(pad_value), dtype=getattr(torch, self.dtype))
        return flat.reshape(self.dense_shape)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype == "int64" and isinstance(next(iter(self.data), None), float):  # then all are
            raise ValueError("data of dtype int64 must be integers")
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices come together")
        if self.is_sparse:
            self._check_csr()
        elif prod(self.dense_shape) != len(self.data):
            raise ValueError(f"{len(self.data)} values do not fill shape {self.dense_shape}")
        return self

    def _check_csr(self) -> None:
        rows, columns = self._csr_indices()
        if self.shape is None or len(self.shape) != 2:
            raise ValueError("a sparse tensor needs shape [rows, columns]")
        if len(rows) != self.shape[0] + 1 or rows[0] != 0 or rows[-1] != len(self.data):
            raise ValueError("sparse_crow_indices must be rows + 1 offsets from 0 to len(data)")
        if any(start > end for start, end in pairwise(rows)):
            raise ValueError("sparse_crow_indices must not decrease")
        if len(columns) != len(self.data) or any(c >= self.shape[1] for c in columns):
            raise ValueError("sparse_col_indices must name one column of the shape per value")

    def _csr_indices(self) -> tuple[list[int], list[int]]:
        return self.sparse_crow_indices or [0], self.sparse_col_indices or []

    def _dense(self, pad_value: int) -> Sequence[float]:
        if not self.is_sparse:
            return self.data
        height, width = self.dense_shape
        offsets, columns = self._csr_indices()
        fill = pad_value if self.dtype == "int64" else float(pad_value)
        dense: list[float] = [fill] * (height * width)
        for row, (start, end) in enumerate(pairwise(offsets)):
            for k in range(start, end):
                dense[row * width + columns[k]] = self.data[k]
        return dense


class RoutedExperts(BaseModel):
    """Experts of some tokens, in the order of the router: `[tokens, layers, experts of a token]`.

    Only layers with experts count. -1 in a datum lets the router choose all experts of that token in that layer. `data` has
    one or two bytes for each number. The sum `a + b` has the tokens of `a` and then those of `b`. The slice
    `a[start:stop]` has some tokens.
    """

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    data: bytes = Field(repr=False)
    dtype: Literal["int8", "int16"]
    shape: tuple[Size, Size, Size]

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return the experts in a nested list, a NumPy array or a torch tensor. Raises UnsupportedInput."""
        if isinstance(values, cls):
            return values
        flat, shape = numbers_and_shape(values, "int64")
        if len(shape) != 3:
            raise UnsupportedInput(f"routed_experts must have shape [tokens, layers, experts of a token], not {shape}")
        if flat and not (min(flat) >= -1 and max(flat) < 2**15):
            raise UnsupportedInput("routed_experts must be numbers of experts, or -1")
        dtype: Literal["int8", "int16"] = "int8" if max(flat, default=0) < 2**7 else "int16"
        return cls(data=to_bytes(_TYPECODE_OF_EXPERTS[dtype], flat), dtype=dtype, shape=tuple(shape))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.shape[0]

    def tolist(self) -> list[list[list[int]]]:
        """Return the experts as nested lists."""
        flat, (tokens, layers, chosen) = self._numbers().tolist(), self.shape
        rows = [flat[at : at + chosen] for at in range(0, len(flat), chosen or 1)]
        return [rows[at * layers : (at + 1) * layers] for at in range(tokens)]

    def to_numpy(self) -> Any:
        """Return the experts as a NumPy array; needs NumPy."""
        numpy = import_module("numpy")
        dtype = numpy.dtype(self.dtype).newbyteorder("<")
        return numpy.frombuffer(self.data, dtype).astype(self.dtype).reshape(self.shape)

    def __add__(self, other: RoutedExperts) -> RoutedExperts:
        if self.shape[1:] != other.shape[1:]:
            raise UnsupportedInput(
                f"routed_experts of shapes {list(self.shape)} and {list(other.shape)} are of other models"
            )
        shape = (self.tokens + other.tokens, *self.shape[1:])
        dtype = self.dtype if self.dtype == other.dtype else "int16"
        data = b"".join(each.data if each.dtype == dtype else to_bytes("h", each._numbers()) for each in (self, other))
        return RoutedExperts(data=data, dtype=dtype, shape=shape)

    def __getitem__(self, some: slice) -> RoutedExperts:
        start, stop, step = some.indices(self.tokens)
        if step != 1:
            raise UnsupportedInput("routed_experts can be cut into adjacent tokens only")
        stop = max(start, stop)
        row = self._row_bytes
        shape = (stop - start, *self.shape[1:])
        return RoutedExperts(data=self.data[start * row : stop * row], dtype=self.dtype, shape=shape)

    @property
    def _row_bytes(self) -> int:
        return array(_TYPECODE_OF_EXPERTS[self.dtype]).itemsize * prod(self.shape[1:])

    def _numbers(self) -> array[Any]:
        return from_bytes(_TYPECODE_OF_EXPERTS[self.dtype], self.data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.data) != self.tokens * self._row_bytes:
            raise ValueError(f"{len(self.data)} bytes do not fill shape {list(self.shape)} of {self.dtype}")
        return self


def read_numbers(values: list[Any], dtype: DType, name: str = "data") -> list[Any]:
    """Convert a flat list of numbers of any kind. Raises UnsupportedInput, which names the first invalid one."""
    try:
        return _READ[dtype].validate_python(values)
    except ValidationError as refused:
        raise UnsupportedInput(name + in_a_sentence(refused)) from None


def numbers_and_shape(values: Any, dtype: DType) -> tuple[list[Any], list[int]]:
    """Convert numbers, nested or not; returns them flat, and their shape. Raises UnsupportedInput."""
    if hasattr(values, "tolist"):
        flat = values if len(values.shape) == 1 else values.reshape(-1)
        return read_numbers(flat.tolist(), dtype), list(values.shape)
    if values is None or isinstance(values, str | bytes | Mapping):
        raise UnsupportedInput(f"it is {reprlib.repr(values)}, and must be a list, an array or a tensor")
    nested = list(values) if isinstance(values, Iterable) else values
    shape = _shape_of(nested)
    # Nearly every list is flat; a walk over its elements would cost more than sending it.
    if len(shape) != 1 or any(issubclass(kind, list | tuple) for kind in {type(value) for value in nested}):
        nested = list(_flatten(nested, shape))
    return read_numbers(nested, dtype), shape


def _sizes(name: str, values: Any) -> list[int] | None:
    if values is None:
        return None
    return read_numbers(list(values), "int64", name)


def _shape_of(nested: Any) -> list[int]:
    if hasattr(nested, "tolist"):
        return list(nested.shape)
    if not isinstance(nested, list | tuple):
        return []
    return [len(nested), *(_shape_of(nested[0]) if nested else [])]


def _flatten(nested: Any, shape: Sequence[int]) -> Iterator[Any]:
    nested = nested.tolist() if hasattr(nested, "tolist") else nested
    if not shape and not isinstance(nested, list | tuple):
        yield nested
        return
    if not shape or not isinstance(nested, list | tuple) or len(nested) != shape[0]:
        raise UnsupportedInput("nested lists must be rectangular")
    for inner in nested:
        yield from _flatten(inner, shape[1:])


def _are_whole(values: Any) -> bool:
    if hasattr(values, "dtype"):  # an empty array also has a dtype
        return "int" in str(values.dtype)
    flat = _flatten(values, _shape_of(values))
    return all(isinstance(value, Integral) for value in flat)


def _nest(flat: Sequence[float], shape: Sequence[int]) -> list[Any]:
    if len(shape) <= 1:
        return list(flat)
    stride = prod(shape[1:])
    return [_nest(flat[i * stride : (i + 1) * stride], shape[1:]) for i in range(shape[0])]


# ---- Encoding of numbers in binary messages: little-endian, in C order -------------------------------


def to_bytes(typecode: str, values: Iterable[float]) -> bytes:
    """Encode numbers in the format of a typecode of the `array` module."""
    return _little_endian(array(typecode, values)).tobytes()


def from_bytes(typecode: str, written: bytes) -> array[Any]:
    """Decode numbers. Raises MalformedMessage if the bytes end within one."""
    values: array[Any] = array(typecode)
    try:
        values.frombytes(written)
    except ValueError as error:
        raise MalformedMessage(f"{len(written)} bytes are no whole number of elements") from error
    return _little_endian(values)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
