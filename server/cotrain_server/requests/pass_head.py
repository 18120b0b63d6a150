"""Fields at the start of a large binary message, read without the rest: the run of a pass, and the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain_server.errors import Invalid
from cotrain_store.errors import MalformedBody

#: Limits within which a large pass must name its run. SDKs need 2 fields and 40 bytes.
HEAD_BYTES = 4096
HEAD_FIELDS = 64
#: Maximum bytes of a run in a sweep: its name, its position and the numbers of its step.
SWEEP_RUN_BYTES = 256

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: Tags: number << 3 | wire type. Data of a pass, and fields of a SweepPassRequest.
_DATA = 3 << 3 | _BYTES
_RUNS, _PASS_REQUEST = 1 << 3 | _BYTES, 2 << 3 | _BYTES
_MALFORMED = "The request is not a ForwardBackwardRequest message."
_MALFORMED_SWEEP = "The request is not a SweepPassRequest message: runs, and then their pass_request."


def head_of(body: bytes) -> bytes:
    """Return the bytes before the first datum. Every SDK writes the run and position there.

    The result ends after HEAD_BYTES or HEAD_FIELDS, for a body of any length.

    Raises:
        MalformedBody: it is not a message.
    """
    end = 0
    for tag, _, stop in islice(_fields(body), HEAD_FIELDS):
        if tag == _DATA or stop > HEAD_BYTES:
            break
        end = stop
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
        (runs, begin, end), (batch, value, stop) = islice(_fields(body), 2)
    except (ValueError, MalformedBody) as other:  # not two fields
        raise MalformedBody(_MALFORMED_SWEEP) from other
    if (runs, batch, stop) != (_RUNS, _PASS_REQUEST, len(body)):
        raise MalformedBody(_MALFORMED_SWEEP)
    if end - begin > SWEEP_RUN_BYTES * MAX_SWEEP_RUNS:
        raise too_many_runs()
    return body[begin:end], body[value:stop]


def _fields(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the tag of each field, and the positions of its value and of the next field. Raises MalformedBody."""
    position = 0
    while position < len(body):
        tag, position = _varint(body, position)
        kind = tag & 7
        if kind == _BYTES:
            size, position = _varint(body, position)
        elif kind == _VARINT:
            size = _varint(body, position)[1] - position
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:  # groups, which no SDK sends
            raise MalformedBody(_MALFORMED)
        stop = position + size
        if stop > len(body) or tag < 8:  # no field has the number 0
            raise MalformedBody(_MALFORMED)
        yield tag, position, stop
        position = stop


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises MalformedBody if it does not end."""
    number = 0
    for at, byte in enumerate(body[position : position + 10]):
        number |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return number, position + at + 1
    raise MalformedBody(_MALFORMED)
