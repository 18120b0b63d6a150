"""Span names across processes: 55 characters, in the format of W3C's header `traceparent`; "" for
no span.
"""

from __future__ import annotations

import re

#: Current version of a `traceparent`: trace, span, flags.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def read_traceparent(text: str) -> tuple[int, int, int] | None:
    """Return trace, span and flags of a `traceparent`; None if it is invalid."""
    found = _TRACEPARENT.fullmatch(text)
    return (int(found[1], 16), int(found[2], 16), int(found[3], 16)) if found else None


def if_sampled(traceparent: str) -> str:
    """Return a `traceparent` whose trace is reported; "" if it is not reported or invalid."""
    parts = read_traceparent(traceparent)
    return traceparent if parts and parts[2] & 1 else ""


def trace_id(traceparent: str) -> str:
    """Return the trace that a span belongs to, in hexadecimal; "" for no span."""
    return traceparent[3:35]
