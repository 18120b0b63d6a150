"""Reader of the header of an uploaded safetensors file, without the tensor values and without torch.

The format is an 8-byte length, a JSON header `{name: {dtype, shape, data_offsets}}` of that length, and the tensors'
bytes. Every byte belongs to exactly one tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from cotrain_server.adapter_upload.strict_json import read_object
from cotrain_server.errors import Invalid

MAX_HEADER_BYTES = 1_000_000
MAX_DIMENSIONS = 8
BYTES_BY_DTYPE: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int  # in bytes from the end of the header


def read_header(content: bytes) -> dict[str, TensorEntry]:
    """Return the dtypes, shapes and offsets of the tensors. Raises Invalid: the file is incomplete, its tensors overlap
    or leave gaps, or a dtype is not in BYTES_BY_DTYPE.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if not 2 <= length <= MAX_HEADER_BYTES or start > len(content):
        raise Invalid("adapter_model.safetensors is not a safetensors file, or is cut short.")
    header = read_object("The header of adapter_model.safetensors", content[_LENGTH_BYTES:start])
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Invalid("The metadata of adapter_model.safetensors is not a map of texts.")
    entries = {name: _entry(named(name), fields) for name, fields in header.items()}
    _check_cover(entries, len(content) - start)
    return entries


def read_metadata(content: bytes) -> dict[str, str]:
    """Return the metadata of a file whose header has been read."""
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = read_object("The header of adapter_model.safetensors", content[_LENGTH_BYTES:end])
    found: dict[str, str] = header.get(_METADATA, {})
    return found


def named(name: str) -> str:
    """Return an uploaded name in printable ASCII of at most 200 characters."""
    return ascii(name)[1:-1][:200]


def _entry(name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise Invalid(f"{name} is not described by dtype, shape and data_offsets.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BYTES_BY_DTYPE:
        raise Invalid(f"{name} is not F64, F32, F16 or BF16.")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise Invalid(f"{name} has an impossible shape.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise Invalid(f"{name} has impossible data_offsets.")
    begin, end = offsets
    if end - begin != prod(shape) * BYTES_BY_DTYPE[dtype]:
        raise Invalid(f"{name} has data_offsets that do not match its shape.")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**48 for each in value)


def _check_cover(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Check that the tensors are contiguous and fill the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise Invalid(f"{named(name)} overlaps another tensor, or leaves a gap before it.")
        position = entry.end
    if position != size:
        raise Invalid("The size of adapter_model.safetensors does not match its header.")
