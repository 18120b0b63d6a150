"""TensorData: an array on the wire, and how lists, NumPy arrays and torch tensors become one.

Knows no NumPy and no torch: an array is whatever has `dtype`, `shape` and `tolist()`.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DType = Literal["int64", "float32"]

Int64 = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class TensorData(BaseModel):
    """An array of `int64` or `float32`: dense in C order, or a CSR matrix of its non-zero entries.

    A dense array without `shape` is one-dimensional. Both `sparse_*` fields together make it CSR:
    then `data` holds only the listed values, and `shape` must be `[rows, columns]`.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    data: list[Int64] | list[float]
    dtype: DType
    shape: list[Size] | None = None
    sparse_crow_indices: list[Size] | None = None
    sparse_col_indices: list[Size] | None = None

    @classmethod
    def of(cls, values: Any, dtype: DType | None = None) -> TensorData:
        """Make a dense array from nested lists, or from anything with `shape` and `tolist()`.

        Without `dtype`, whole numbers become `int64` and all others `float32`. Raises ValueError
        where nested lists are ragged.
        """
        is_array = hasattr(values, "tolist")
        nested = values.tolist() if is_array else values
        shape = list(values.shape) if is_array else _shape_of(nested)
        flat = nested if _is_flat(nested, shape) else list(_flatten(nested, shape))
        dtype = dtype or ("int64" if _are_whole(flat, values) else "float32")
        return cls(data=flat, dtype=dtype, shape=shape)

    @classmethod
    def from_numpy(cls, array: Any) -> TensorData:
        """Make a dense array from a NumPy array."""
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        """Make a dense array from a torch tensor on any device; copies it to the host."""
        return cls.of(tensor)

    @property
    def is_sparse(self) -> bool:
        """Whether this is a CSR matrix."""
        return self.sparse_crow_indices is not None

    @property
    def dense_shape(self) -> list[int]:
        """Shape of the array, counted where it was not given."""
        return [len(self.data)] if self.shape is None else self.shape

    def tolist(self) -> list[Any]:
        """Copy the array to nested lists, one level per dimension; a CSR matrix is filled with 0."""
        return _nest(self._dense(), self.dense_shape)

    def to_numpy(self) -> Any:
        """Copy the array to a NumPy array; needs NumPy."""
        # By name: NumPy and torch are the caller's, this package depends on neither.
        numpy = import_module("numpy")
        return numpy.array(self._dense(), dtype=self.dtype).reshape(self.dense_shape)

    def to_torch(self) -> Any:
        """Copy the array to a torch tensor on the host; needs torch."""
        torch = import_module("torch")
        flat = torch.tensor(self._dense(), dtype=getattr(torch, self.dtype))
        return flat.reshape(self.dense_shape)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype == "int64" and any(isinstance(value, float) for value in self.data):
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

    def _dense(self) -> Sequence[float]:
        if not self.is_sparse:
            return self.data
        height, width = self.dense_shape
        offsets, columns = self._csr_indices()
        dense: list[float] = [0 if self.dtype == "int64" else 0.0] * (height * width)
        for row, (start, end) in enumerate(pairwise(offsets)):
            for k in range(start, end):
                dense[row * width + columns[k]] = self.data[k]
        return dense


def _shape_of(nested: Any) -> list[int]:
    if not isinstance(nested, list | tuple):
        return []
    return [len(nested), *(_shape_of(nested[0]) if nested else [])]


def _is_flat(nested: Any, shape: Sequence[int]) -> bool:
    # Nearly every array here is; to walk it element by element would cost more than to send it.
    return len(shape) == 1 and not any(isinstance(value, list | tuple) for value in nested)


def _flatten(nested: Any, shape: Sequence[int]) -> Iterator[float]:
    if not shape:
        if isinstance(nested, list | tuple):
            raise ValueError("nested lists must be rectangular")
        yield nested
        return
    if not isinstance(nested, list | tuple) or len(nested) != shape[0]:
        raise ValueError("nested lists must be rectangular")
    for inner in nested:
        yield from _flatten(inner, shape[1:])


def _are_whole(flat: Sequence[float], values: Any) -> bool:
    if hasattr(values, "dtype"):  # an empty array still says what it holds
        return "int" in str(values.dtype)
    return all(isinstance(value, int) for value in flat)


def _nest(flat: Sequence[float], shape: Sequence[int]) -> list[Any]:
    if len(shape) <= 1:
        return list(flat)
    stride = prod(shape[1:])
    return [_nest(flat[i * stride : (i + 1) * stride], shape[1:]) for i in range(shape[0])]
