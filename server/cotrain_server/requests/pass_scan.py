"""Scan of a binary pass before any object is created: count its content, and remove unknown fields.

A datum takes two bytes on the wire and a hundred as an object, and the protobuf library keeps
unknown fields. The scan therefore reads the lengths of all fields, at half a microsecond each, and
no values. It stops at the limit and reads nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain_server.errors import Invalid
from cotrain_store.errors import MalformedBody

#: Limit that `client/config` sends to SDKs, which split larger calls (`fwdbwd_max_chunk_len`). Our
#: client applies it on its own.
MAX_DATUMS = 65_536
#: Maximum counts in one request, over all its datums.
LIMITS: Mapping[str, int] = MappingProxyType({
    "data": MAX_DATUMS,
    "model_input": 4 * MAX_DATUMS,
    "loss_fn_inputs": 4 * MAX_DATUMS,
    "loss_fn_config": 64,
    # In bytes: two numbers of at most ten bytes each.
    "shape": 20 * 4 * MAX_DATUMS,
    # Of any kind, including unknown ones. A datum of one chunk and three inputs has 21.
    "field": 32 * MAX_DATUMS,
})  # fmt: skip
_UNITS = {
    "data": "datums",
    "model_input": "chunks",
    "loss_fn_inputs": "tensors",
    "loss_fn_config": "settings",
    "shape": "bytes",
    "field": "fields",
}

#: Limits within which a large pass must name its run. SDKs need 2 fields and 40 bytes.
HEAD_BYTES = 4096
HEAD_FIELDS = 64
#: Maximum bytes of a run in a sweep: its name, its position and the numbers of its step.
SWEEP_RUN_BYTES = 256

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MALFORMED = "The request is not a ForwardBackwardRequest message."
_MALFORMED_SWEEP = "The request is not a SweepPassRequest message: runs, and then their pass_request."


class TooManyObjects(Invalid):
    """A pass exceeds a limit on its content."""

    def __init__(self, field: str) -> None:
        super().__init__(
            f"{field}: one request holds at most {LIMITS[field]} {_UNITS[field]}. Send it in several calls."
        )


@dataclass(frozen=True)
class _Field:
    """A known field: the fields it contains, by tag, and the limit that it counts towards."""

    fields: Mapping[int, _Field] | None = None
    counts_as: str | None = None


# By tag: number << 3 | wire type. A known number with another wire type is unknown, as for the protobuf parser.
_VALUE = _Field()
_UNKNOWN = _Field()
_MESSAGE_OF_BYTES = {0x0A: _VALUE}
_IMAGE = {0x0A: _VALUE, 0x12: _VALUE, 0x18: _VALUE, 0x22: _Field({0x08: _VALUE, 0x10: _VALUE})}
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
    # 3 and 4 describe the origin of sampled tokens.
}
_DATA = 0x1A
_PASS = {
    0x0A: _VALUE,
    0x10: _VALUE,
    _DATA: _Field(_DATUM, counts_as="data"),
    0x22: _VALUE,
    0x2A: _Field({0x0A: _VALUE, 0x11: _VALUE}, counts_as="loss_fn_config"),
    0x30: _VALUE,
    0x3A: _Field({0x0A: _VALUE, 0x12: _Field({0x09: _VALUE, 0x12: _VALUE})}, counts_as="loss_fn_config"),
}
#: Fields of a SweepPassRequest.
_RUNS, _PASS_REQUEST = 0x0A, 0x12


def strip_unknown_fields(body: bytes, max_fields: int | None = None) -> bytes:
    """Return a pass without its unknown fields, or the same bytes if it has none.

    Raises:
        TooManyObjects: it exceeds one of LIMITS, or has more than `max_fields` fields.
        MalformedBody: it is not a message.
    """
    left = dict(LIMITS)
    if max_fields is not None:
        left["field"] = max_fields
    try:
        lean = _lean(body, 0, len(body), _PASS, left)
    except IndexError as cut:
        raise MalformedBody(_MALFORMED) from cut
    return body if lean is None else lean


def _lean(body: bytes, start: int, end: int, known: Mapping[int, _Field], left: dict[str, int]) -> bytes | None:
    """Return a copy of a message without its unknown fields, or None if it has none. Subtract its fields from `left`."""
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
    """Return the bytes before the first datum. Every SDK writes the run and position there.

    The result ends after HEAD_BYTES or HEAD_FIELDS, for a body of any length.

    Raises:
        MalformedBody: it is not a message.
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


def too_many_runs() -> Invalid:
    """Return the refusal of a sweep with too many runs."""
    return Invalid(f"runs: one request is for at most {MAX_SWEEP_RUNS} runs. Send it in several calls.")


def split_sweep(body: bytes) -> tuple[bytes, bytes]:
    """Return the SweepRuns of a SweepPassRequest, and its pass.

    Raises:
        Invalid: the runs take more bytes than MAX_SWEEP_RUNS runs can.
        MalformedBody: it is not a message, or has no pass after the runs.
    """
    try:
        (runs, _, begin, end), (batch, _, value, stop) = islice(_fields(body, 0, len(body)), 2)
    except (ValueError, IndexError) as other:  # fewer than two fields, or the body is cut
        raise MalformedBody(_MALFORMED_SWEEP) from other
    if (runs, batch, stop) != (_RUNS, _PASS_REQUEST, len(body)):
        raise MalformedBody(_MALFORMED_SWEEP)
    if end - begin > SWEEP_RUN_BYTES * MAX_SWEEP_RUNS:
        raise too_many_runs()
    return body[begin:end], body[value:stop]


def _fields(body: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tag of each field, and the positions of the field, its value and the next field."""
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
        else:  # groups, which no SDK sends
            raise MalformedBody(_MALFORMED)
        stop = position + size
        if stop > end or tag < 8:  # no field has the number 0
            raise MalformedBody(_MALFORMED)
        yield tag, begin, position, stop
        position = stop


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises MalformedBody if it does not end."""
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
