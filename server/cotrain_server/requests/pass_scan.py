"""Look over a binary pass before anything is built of it: count what it holds, leave out what nothing here reads.

A datum is two bytes on the wire and a hundred once it is an object, and an unknown field is kept by the
library that parses it. So the lengths of all fields are walked here, at half a microsecond each, and no
value is read. A walk ends at the limit. Nothing is read behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from cotrain_server.errors import Invalid
from cotrain_store.errors import MalformedBody

#: `client/config` has SDKs cut larger calls (`fwdbwd_max_chunk_len`); our client says so itself.
MAX_DATUMS = 65_536
LIMITS: Mapping[str, int] = MappingProxyType({
    "data": MAX_DATUMS,
    "model_input": 4 * MAX_DATUMS,
    "loss_fn_inputs": 4 * MAX_DATUMS,
    "loss_fn_config": 64,
    # Bytes of them: two numbers, ten bytes each at most.
    "shape": 20 * 4 * MAX_DATUMS,
    # Of any kind, unknown ones too: 21 in a datum of one chunk and three inputs.
    "field": 32 * MAX_DATUMS,
})  # fmt: skip
"""How many a request may hold, over all its datums."""
_UNITS = {
    "data": "datums",
    "model_input": "chunks",
    "loss_fn_inputs": "tensors",
    "loss_fn_config": "settings",
    "shape": "bytes",
    "field": "fields",
}

#: Where a pass must say whose it is, if it holds more than is read at once. SDKs need 2 fields and 40 bytes.
HEAD_BYTES = 4096
HEAD_FIELDS = 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MALFORMED = "The request is not a ForwardBackwardRequest message."


class TooManyObjects(Invalid):
    """A pass holds more of something than it may."""

    def __init__(self, field: str) -> None:
        super().__init__(
            f"{field}: one request holds at most {LIMITS[field]} {_UNITS[field]}. Send it in several "
            "calls."
        )


@dataclass(frozen=True)
class _Field:
    """A field that is read here: what lies in it, by tag, and as what it is counted."""

    fields: Mapping[int, _Field] | None = None
    counts_as: str | None = None


# By tag: number << 3 | wire type. A known number of another type is unknown, to the parser as well.
_VALUE = _Field()
_UNKNOWN = _Field()
_MESSAGE_OF_BYTES = {0x0A: _VALUE}
_IMAGE = {
    0x0A: _VALUE,
    0x12: _VALUE,
    0x18: _VALUE,
    0x22: _Field({0x08: _VALUE, 0x10: _VALUE}),
}
_CHUNK = {0x0A: _Field(_MESSAGE_OF_BYTES), 0x12: _Field(_IMAGE), 0x1A: _Field(_MESSAGE_OF_BYTES)}
_SHAPE = _Field(counts_as="shape")
_TENSOR = {
    0x0A: _VALUE,
    0x12: _Field({0x0A: _VALUE, 0x12: _VALUE, 0x1A: _VALUE}),
    0x18: _VALUE,
    0x20: _SHAPE,
    0x22: _SHAPE,
}
_DATUM = {
    0x0A: _Field(_CHUNK, counts_as="model_input"),
    0x12: _Field({0x0A: _VALUE, 0x12: _Field(_TENSOR)}, counts_as="loss_fn_inputs"),
    # 3 and 4 say where tokens were sampled.
}
_DATA = 0x1A
_PASS = {
    0x0A: _VALUE,
    0x10: _VALUE,
    _DATA: _Field(_DATUM, counts_as="data"),
    0x22: _VALUE,
    0x2A: _Field({0x0A: _VALUE, 0x11: _VALUE}, counts_as="loss_fn_config"),
    0x30: _VALUE,
    0x3A: _Field(
        {0x0A: _VALUE, 0x12: _Field({0x09: _VALUE, 0x12: _VALUE})}, counts_as="loss_fn_config"
    ),
}


def strip_unknown_fields(body: bytes, max_fields: int | None = None) -> bytes:
    """Give a pass without the fields that nothing here reads; the same bytes where there are none.

    Raises:
        TooManyObjects: it holds more than MOST of something, or more than `most_fields` fields.
        MalformedBody: it is no message.
    """
    left = dict(LIMITS)
    if max_fields is not None:
        left["field"] = max_fields
    try:
        lean = _lean(body, 0, len(body), _PASS, left)
    except IndexError as cut:
        raise MalformedBody(_MALFORMED) from cut
    return body if lean is None else lean


def _lean(
    body: bytes, start: int, end: int, known: Mapping[int, _Field], left: dict[str, int]
) -> bytes | None:
    """Copy a message without its unknown fields; None where there is nothing to leave out."""
    kept: list[bytes] = []
    kept_to = start
    for tag, begin, value, stop in _fields(body, start, end):
        field = known.get(tag, _UNKNOWN)
        left["field"] -= 1
        if left["field"] < 0:
            raise TooManyObjects("field")
        if field.counts_as:
            left[field.counts_as] -= stop - value if field is _SHAPE else 1
            if left[field.counts_as] < 0:
                raise TooManyObjects(field.counts_as)
        if field is _VALUE or field is _SHAPE:
            continue
        lean = b""
        if field.fields:
            inner = _lean(body, value, stop, field.fields, left)
            if inner is None:
                continue
            lean = bytes((tag,)) + _varint_of(len(inner)) + inner
        kept += (body[kept_to:begin], lean) if kept_to < begin else (lean,)
        kept_to = stop
    if kept_to == start:
        return None
    return b"".join((*kept, body[kept_to:end]))


def head_of(body: bytes) -> bytes:
    """Return what stands before the first datum: whose pass it is, as every SDK writes it.

    It ends after HEAD_BYTES or HEAD_FIELDS, however long the body is.

    Raises:
        MalformedBody: it is no message.
    """
    end = 0
    try:
        for tag, _, _, stop in islice(_fields(body, 0, len(body)), HEAD_FIELDS):
            if tag not in _PASS or tag == _DATA or stop > HEAD_BYTES:
                break
            end = stop
    except IndexError as cut:
        raise MalformedBody(_MALFORMED) from cut
    return body[:end]


def _fields(body: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk a message: tag, and where the field, its value and the next field begin."""
    while position < end:
        begin = position
        tag = body[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(body, begin)
        kind = tag & 7
        if kind == _BYTES:
            size = body[position]
            position += 1
            if size > 0x7F:
                size, position = _varint(body, position - 1)
        elif kind == _VARINT:
            size = 1 if body[position] < 0x80 else _varint(body, position)[1] - position
        elif kind == _FIXED64:
            size = 8
        elif kind == _FIXED32:
            size = 4
        else:  # groups, which no SDK has
            raise MalformedBody(_MALFORMED)
        stop = position + size
        if stop > end or tag < 8:  # no field has the number 0
            raise MalformedBody(_MALFORMED)
        yield tag, begin, position, stop
        position = stop


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Read a number, and where the next byte is. Raises MalformedBody: it has no end."""
    number = 0
    for bits in range(0, 70, 7):
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << bits
        if byte < 0x80:
            return number, position
    raise MalformedBody(_MALFORMED)


def _varint_of(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
