"""RoutedExperts: the experts of some tokens, on the wire and in datums, without NumPy."""

from __future__ import annotations

from array import array
from importlib import import_module
from math import prod
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cotrain.errors import UnsupportedInput
from cotrain.wire.tensors import Size, from_bytes, numbers_and_shape, to_bytes

__all__ = ["RoutedExperts"]

_TYPECODE = {"int8": "b", "int16": "h"}


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
        return cls(data=to_bytes(_TYPECODE[dtype], flat), dtype=dtype, shape=tuple(shape))

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
        dtype = max(self.dtype, other.dtype, key=lambda each: array(_TYPECODE[each]).itemsize)
        data = b"".join(
            each.data if each.dtype == dtype else to_bytes(_TYPECODE[dtype], each._numbers()) for each in (self, other)
        )
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
        return array(_TYPECODE[self.dtype]).itemsize * prod(self.shape[1:])

    def _numbers(self) -> array[Any]:
        return from_bytes(_TYPECODE[self.dtype], self.data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.data) != self.tokens * self._row_bytes:
            raise ValueError(f"{len(self.data)} bytes do not fill shape {list(self.shape)} of {self.dtype}")
        return self
