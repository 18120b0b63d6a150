"""A span's name across processes: 55 characters, as W3C's header `traceparent` has them; "" is none."""

from __future__ import annotations

import re

#: A `traceparent` of the version there is: trace, span, flags.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def read_traceparent(text: str) -> tuple[int, int, int] | None:
    """Read a `traceparent`: trace, span and flags; None where it is none."""
    found = _TRACEPARENT.fullmatch(text)
    return (int(found[1], 16), int(found[2], 16), int(found[3], 16)) if found else None


def if_sampled(traceparent: str) -> str:
    """Return a `traceparent` whose trace is reported; "" for any other, and for what is none."""
    parts = read_traceparent(traceparent)
    return traceparent if parts and parts[2] & 1 else ""


def trace_id(traceparent: str) -> str:
    """Return the trace that a span belongs to, in hexadecimal; "" for none."""
    return traceparent[3:35]
