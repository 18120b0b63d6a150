"""Bytes of single tokens, as the decoder of a vocabulary makes them.

A character may need several tokens. Their text alone has lost its bytes: each becomes U+FFFD.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_reader(vocabulary: tokenizers.Tokenizer) -> Callable[[str], bytes | None]:
    """Return a function from a token's spelling to its bytes, or to None if only its text is known."""
    decoder = vocabulary.decoder
    parts = () if decoder is None else _flat(json.loads(decoder.__getstate__()))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    return _byte_fallback if "ByteFallback" in kinds else lambda _: None


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for part in decoder.get("decoders", ()):
        yield from _flat(part)


def _byte_fallback(token: str) -> bytes | None:
    found = _FALLBACK.fullmatch(token)
    return bytes.fromhex(found[1]) if found else None


def _byte_level(token: str) -> bytes:
    # An added token is spelled as it reads; a space in it says so.
    try:
        return bytes(_BYTE_BY_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


def _letters() -> dict[str, int]:
    """Return GPT-2's letter for each byte: itself if printable, else one above U+0100."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in prints]
    return {**{chr(byte): byte for byte in prints}, **{chr(0x100 + at): byte for at, byte in enumerate(hidden)}}


_BYTE_BY_LETTER = _letters()
