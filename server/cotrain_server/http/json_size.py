"""Count what a JSON body holds before it is parsed: a list is two bytes on the wire and 56 in memory.

In time and memory of the body's size whatever it holds, which no regular expression is for a string that
never ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cotrain_server.errors import BodyTooLarge, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_JSON_DEPTH = 32


@dataclass(frozen=True)
class JsonLimits:
    """How much a JSON body may hold."""

    values: int
    """Numbers, texts, lists, objects, and names in objects."""
    containers: int
    """Lists and objects: each costs several times what a number does."""


#: What is read by the event loop itself: 20,000 values are a few milliseconds.
FEW = JsonLimits(values=20_000, containers=20_000)
#: SDKs send passes as protobuf. As JSON this is a million tokens with three inputs, or 10,000 datums.
MANY = JsonLimits(values=4 * 1024**2, containers=256 * 1024)
#: A chat of thousands of messages, or 256 prompts of tokens.
CHATS = JsonLimits(values=4 * 1024**2, containers=16 * 1024)

_BLOCK_BYTES = 1 << 20
_STEP_BY_SYMBOL = np.zeros(256, np.int8)
_STEP_BY_SYMBOL[[ord("["), ord("{")]] = 1
_STEP_BY_SYMBOL[[ord("]"), ord("}")]] = -1
_BEFORE_VALUE = np.zeros(256, np.bool_)
_BEFORE_VALUE[[ord("["), ord("{"), ord(","), ord(":")]] = True
_QUOTE = ord('"')


def count_json(body: bytes, limits: JsonLimits) -> int:
    """Count the values of a JSON body; where it is none, anything.

    Raises:
        BodyTooLarge: more than the limits.
        Unreadable: brackets nest deeper than MAX_JSON_DEPTH.
    """
    depth = quotes = containers = values = 0
    for block in _blocks(body):
        # First the escaped backslashes: then a quote behind one is escaped, and any other ends a string.
        symbols = np.frombuffer(block.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        if not len(symbols):
            continue
        quotes_before = quotes + np.cumsum(symbols == _QUOTE, dtype=np.int32)
        is_outside = quotes_before % 2 == 0
        steps = np.where(is_outside, _STEP_BY_SYMBOL[symbols], 0)
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > MAX_JSON_DEPTH:
            raise Unreadable(f"The JSON body is nested deeper than {MAX_JSON_DEPTH} levels.")
        containers += int(np.count_nonzero(steps > 0))
        values += int(np.count_nonzero(_BEFORE_VALUE[symbols] & is_outside))
        if containers > limits.containers:
            raise BodyTooLarge(
                f"The JSON body holds more than {limits.containers} lists and objects."
            )
        if values > limits.values:
            raise BodyTooLarge(f"The JSON body holds more than {limits.values} values.")
        depth, quotes = int(depths[-1]), int(quotes_before[-1])
    return values


def _blocks(body: bytes) -> Iterator[bytes]:
    """Cut a body where nothing is escaped: counts take several times the space of what they are of."""
    start = 0
    while start < len(body):
        end = start + _BLOCK_BYTES
        block = body[start:end]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            end += 1
            block = body[start:end]
        yield block
        start = end
