"""How arrays of numbers lie in the bytes of the wire: little-endian, in C order."""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any

from cotrain.errors import MalformedMessage

if TYPE_CHECKING:
    from collections.abc import Iterable


def pack(typecode: str, values: Iterable[float]) -> bytes:
    """Write numbers as the `array` module's typecode says."""
    return _little_endian(array(typecode, values)).tobytes()


def unpack(typecode: str, packed: bytes) -> array[Any]:
    """Read numbers back. Raises MalformedMessage where the bytes end within one."""
    values: array[Any] = array(typecode)
    try:
        values.frombytes(packed)
    except ValueError as error:
        raise MalformedMessage(f"{len(packed)} bytes are no whole number of elements") from error
    return _little_endian(values)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
