"""Text to tokens and back, for whole texts (`Tokenizer`) and for tokens that arrive one by one (`TextGrowth`).

No model library is needed: the `tokenizers` wheel reads the file.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Self

import tokenizers

from cotrain_server.errors import Unreadable

#: Spelling of a space in SentencePiece.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
#: A character has at most four bytes, so four tokens contain all bytes of the last character.
_TOKENS_BEFORE = 4
#: Spelling of a token of one byte.
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Vocabulary of one model."""

    def __init__(self, vocabulary: tokenizers.Tokenizer) -> None:
        # The file may turn on truncation and padding, which would change prompts unnoticed.
        # `transformers` ignores these settings, too.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._vocabulary = vocabulary
        added = vocabulary.get_added_tokens_decoder()
        self._special = {token: one.content for token, one in added.items() if one.special}
        self._bytes_of = _byte_reader(vocabulary)
        self._raw: dict[int, bytes | None] = {}
        """Cache of `raw_bytes`."""
        self._full: dict[int, bytes] = {}
        """Cache of `token_bytes` within a text."""
        self.drops_first_space, self.text_start = self._probe_first_space()
        """`drops_first_space`: True if decoding removes the space of the first token of a text.
        `text_start`: tokens without text, to decode others after them so that these keep their space.
        """

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json`. Raises OSError if it is missing."""
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        return cls(tokenizers.Tokenizer.from_str(text))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text. With `special`, the control tokens that the model expects around a plain text
        are added.

        A million characters take seconds, so call it in a thread. Raises Unreadable: half a surrogate pair, which JSON
        can contain and UTF-8 cannot.
        """
        try:
            # Unlike `encode`, this releases the interpreter lock.
            [encoding] = self._vocabulary.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:
            raise Unreadable("The text is not valid Unicode: it contains half of a surrogate pair.") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens. Without `special`, control tokens have none."""
        growth = TextGrowth(self, begins=True)
        return growth.push(tokens, special=special) + growth.finish()

    def without_first_space(self, text: str) -> str:
        """Return a text without its first space, if the vocabulary drops that space in decoding."""
        return text.removeprefix(" ") if self.drops_first_space else text

    def is_special(self, token: int) -> bool:
        """Return True if a token is a control token."""
        return token in self._special

    def control_tokens(self, names: Collection[str]) -> frozenset[int]:
        """Return the control tokens with some names."""
        return frozenset(token for token, name in self._special.items() if name in names)

    def has_text(self, token: int, *, special: bool = False) -> bool:
        """Return True if a token adds to a text. Control tokens do so only with `special`."""
        return special if self.is_special(token) else self.raw_bytes(token) != b""

    def last_with_text(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens with text that may affect the text of the next token."""
        with_text = (token for token in reversed(tokens) if self.has_text(token))
        return list(islice(with_text, _TOKENS_BEFORE))[::-1]

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that may hold part of a character.

        None for a token of whole characters, because its text depends on its position.
        """
        try:
            return self._raw[token]
        except KeyError:
            spelled = self._vocabulary.id_to_token(token)
            raw = self._raw[token] = b"" if spelled is None else self._bytes_of(spelled)
            return raw

    def count_added_before(self, prompt: Sequence[int]) -> int:
        """Return the number of control tokens at a prompt's start that `encode` adds to any text."""
        added = self.encode("", special=True)
        return next(
            (at for at, (a, b) in enumerate(zip(added, prompt, strict=False)) if a != b), min(len(added), len(prompt))
        )

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """Return the bytes that a token adds within a text, or as its first token (`begins`).

        A control token adds its name.
        """
        found = self._full.get(token)
        if found is None:
            raw = self._special[token].encode() if token in self._special else self.raw_bytes(token)
            found = self.text_behind(self.text_start, [token]).encode() if raw is None else raw
            self._full[token] = found
        return found.removeprefix(b" ") if begins and self.drops_first_space else found

    def token_name(self, token: int, *, begins: bool = False) -> str:
        """Return one token as text. Part of a character is written in OpenAI's notation for bytes."""
        content = self.token_bytes(token, begins=begins)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def text_behind(self, before: list[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add after `before`. No token may hold part of a character."""
        text: str = self._vocabulary.decode([*before, *tokens], skip_special_tokens=False)
        return text[len(self._vocabulary.decode(before, skip_special_tokens=False)) :]

    def _probe_first_space(self) -> tuple[bool, list[int]]:
        """Return `drops_first_space` and `text_start`, from the decoding of two spaces."""
        space = self._vocabulary.token_to_id(_SPACE)
        if space is None:
            return False, []
        twice: str = self._vocabulary.decode([space, space], skip_special_tokens=False)
        return (True, [space]) if twice == " " else (False, [])


class _Kind(Enum):
    """Decoding of a token: by name, by the vocabulary's decoder, or from its bytes."""

    CONTROL = auto()
    TEXT = auto()
    BYTES = auto()


class TextGrowth:
    """Text of a growing token sequence, in chunks that never end within a character.

    Each token is read once. Bytes pass through an incremental UTF-8 decoder, so an invalid byte
    does not affect its neighbours. Text tokens are decoded after the previous token.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, begins: bool = False, shown: Collection[int] = ()
    ) -> None:
        """Create an empty text after the tokens `before`, which are not part of it.

        With `begins`, its first token loses a first space as if nothing preceded it. `shown` are
        control tokens that are always included.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = tokenizer.text_start
        self.begins = False
        self.push(tokenizer.last_with_text(before))  # only their effect on the next token stays
        self.begins = begins
        """True if the next token is the first one, whose space some vocabularies drop."""

    def push(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Add tokens, and return the text that has become final. `special` includes control tokens."""
        has_text = self._tokenizer.has_text
        visible = (t for t in tokens if has_text(t, special=special) or t in self._shown)
        return "".join(self._grow(kind, list(run)) for kind, run in groupby(visible, self._kind))

    def finish(self) -> str:
        """Return the rest: bytes of incomplete characters."""
        return self._characters.decode(b"", final=True)

    def _grow(self, kind: _Kind, run: Sequence[int]) -> str:
        if kind is _Kind.TEXT:
            text = self.finish() + self._tokenizer.text_behind(self._last, run)
        else:
            text = self._characters.decode(b"".join(map(self._tokenizer.token_bytes, run)))
        self._last = [run[-1]]
        if self.begins and kind is not _Kind.CONTROL:
            self.begins = False
            text = self._tokenizer.without_first_space(text)
        return text

    def _kind(self, token: int) -> _Kind:
        if self._tokenizer.is_special(token):
            return _Kind.CONTROL
        return _Kind.TEXT if self._tokenizer.raw_bytes(token) is None else _Kind.BYTES


def _byte_reader(vocabulary: tokenizers.Tokenizer) -> Callable[[str], bytes | None]:
    """Return a function from a token's spelling to its bytes, or to None if only its text is known.

    A character may need several tokens. In their text alone, each of its bytes is U+FFFD.
    """
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
    # The spelling of an added token is its text. It may have characters that are no letters of bytes, such as a space.
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
