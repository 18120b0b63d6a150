"""Tokenizers and chat templates of base models, read once per process.

A `Tokenizer` converts text to tokens and back, with the files that a pool's worker published. It
needs no model library: the `tokenizers` wheel reads the file. `chat_template` renders chats.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Self

import structlog
import tokenizers
from jinja2 import TemplateSyntaxError

from cotrain_server.errors import Invalid, Unreadable
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis.chat_template import ChatTemplate
from cotrain_server.text_apis.token_bytes import byte_reader
from cotrain_store.blobs.folder import Folder
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.errors import StoreUnavailable
from cotrain_store.messages.runs import PoolRecord

#: Replacement for bytes of incomplete characters.
PARTIAL = "\N{REPLACEMENT CHARACTER}"
#: Spelling of a space in SentencePiece.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
#: A character has at most four bytes, so four tokens contain all bytes of the last character.
_TOKENS_BEFORE = 4


class Tokenizer:
    """Vocabulary of one model."""

    def __init__(self, vocabulary: tokenizers.Tokenizer) -> None:
        # Both would change prompts unnoticed. `transformers` ignores these settings of the file,
        # too.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._vocabulary = vocabulary
        added = vocabulary.get_added_tokens_decoder()
        self._special = {token: one.content for token, one in added.items() if one.special}
        self._bytes_of = byte_reader(vocabulary)
        self._raw: dict[int, bytes | None] = {}
        self._full: dict[int, bytes] = {}
        self.drops_first_space, self.text_start = self._probe_first_space()
        """True if a text loses the space of its first token; a token without text as decoding
        context for others.
        """

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json`. Raises OSError if it is missing."""
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return cls(tokenizers.Tokenizer.from_str(text))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Split text into tokens. `special` adds the model's control tokens at the start of a plain
        text.

        A million characters take seconds, so call it in a thread.

        Raises:
            Unreadable: half a surrogate pair, which JSON can contain and UTF-8 cannot.
        """
        try:
            # Unlike `encode`, this releases the interpreter lock.
            [cut] = self._vocabulary.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:
            raise Unreadable(
                "The text is not valid Unicode: it contains half of a surrogate pair."
            ) from error
        ids: list[int] = cut.ids
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens. Without `special`, control tokens have none."""
        growth = TextGrowth(self, begins=True)
        return growth.push(tokens, special=special) + growth.finish()

    def without_first_space(self, text: str) -> str:
        """Return the start of a text without the extra space that some vocabularies put before each
        word.
        """
        return text.removeprefix(" ") if self.drops_first_space else text

    def is_special(self, token: int) -> bool:
        """Return True if a token is a control token."""
        return token in self._special

    def has_text(self, token: int, *, special: bool = False) -> bool:
        """Return True if a token adds to a text. A control token does only with `special`."""
        return special if self.is_special(token) else self.raw_bytes(token) != b""

    def last_with_text(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens with text, as many as the next token can depend on."""
        seen = (token for token in reversed(tokens) if self.has_text(token))
        return list(islice(seen, _TOKENS_BEFORE))[::-1]

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that may be part of a character, or None for a token of whole
        text.
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
            (at for at, (a, b) in enumerate(zip(added, prompt, strict=False)) if a != b),
            min(len(added), len(prompt)),
        )

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """Return the bytes that a token adds within a text, or at its start (`begins`). A control
        token adds its name.
        """
        found = self._full.get(token)
        if found is None:  # log-probs contain the same few thousand tokens repeatedly
            raw = self._special[token].encode() if token in self._special else self.raw_bytes(token)
            found = self.text_behind(self.text_start, [token]).encode() if raw is None else raw
            self._full[token] = found
        return found.removeprefix(b" ") if begins and self.drops_first_space else found

    def token_name(self, token: int, *, begins: bool = False) -> str:
        """Return one token as text: part of a character in OpenAI's notation, a control token by
        its name.
        """
        content = self.token_bytes(token, begins=begins)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def text_behind(self, before: list[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add after others. None of them may be part of a character."""
        text: str = self._vocabulary.decode([*before, *tokens], skip_special_tokens=False)
        return text[len(self._vocabulary.decode(before, skip_special_tokens=False)) :]

    def _probe_first_space(self) -> tuple[bool, list[int]]:
        space = self._vocabulary.token_to_id(_SPACE)
        if space is None:
            return False, []
        twice: str = self._vocabulary.decode([space, space], skip_special_tokens=False)
        return (True, [space]) if twice == " " else (False, [])


class _Kind(Enum):
    CONTROL = auto()
    TEXT = auto()
    BYTES = auto()


class TextGrowth:
    """Text of a growing token sequence, in chunks that never end within a character.

    Each token is read once. Bytes pass through an incremental UTF-8 decoder, so an invalid byte
    does not affect its neighbours. Text tokens are decoded after the previous token.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, begins: bool = False
    ) -> None:
        """Create an empty text after the tokens `before`, which are not part of it. With `begins`
        it stands alone.
        """
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = tokenizer.text_start
        self.begins = False
        self.push(tokenizer.last_with_text(before))
        self.begins = begins
        """True if the next token is the first one, whose space some vocabularies drop."""

    def push(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Add tokens, and return the text that has become final. `special` includes control tokens."""
        visible = (token for token in tokens if self._tokenizer.has_text(token, special=special))
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


class VisibleText:
    """Visible text of one sequence, which ends before a stop string or a final token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        final_tokens: Iterable[int],
        *,
        before: Sequence[int] = (),
        begins: bool = False,
    ) -> None:
        """Create an empty text after the tokens `before`. With `begins` it stands alone
        nevertheless.
        """
        self._growth = TextGrowth(tokenizer, before)
        self._tokenizer = tokenizer
        self._begins = begins
        self._stop = tuple(stop)
        self._final = frozenset(final_tokens)
        self._pending = ""
        self.stopped_by: str | None = None
        """Stop string that ended the text; None if none did."""

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens, and return the text that can be shown. A possible start of a stop string is
        withheld.
        """
        grown = self._growth.push(token for token in tokens if token not in self._final)
        return self._show(self._pending + grown, at_end=False)

    def finish(self) -> str:
        """Return the withheld text after the last token."""
        return self._show(self._pending + self._growth.finish(), at_end=True)

    def _show(self, text: str, *, at_end: bool) -> str:
        if self.stopped_by is not None:
            return ""
        at, found = min(
            ((text.find(stop), stop) for stop in self._stop if stop in text), default=(-1, None)
        )
        if found is not None:
            self.stopped_by, self._pending = found, ""
            return self._shown(text[:at])
        shown = len(text) if at_end else len(text) - self._possible_start(text)
        self._pending = text[shown:]
        return self._shown(text[:shown])

    def _shown(self, text: str) -> str:
        if not (self._begins and text):
            return text
        self._begins = False
        return self._tokenizer.without_first_space(text)

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest suffix that could start a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        counts = range(longest, 0, -1)
        return next((n for n in counts if any(s.startswith(text[-n:]) for s in self._stop)), 0)


log = structlog.get_logger()

_READ_FIRST = "tokenizer.json"
#: Number of cached languages. One with a large vocabulary takes about 100 MB.
_KEPT = 8


@dataclass(frozen=True)
class Language:
    """Tokenizer and chat template of one base model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


async def published_tokenizer(pool: PoolRecord, settings: ServerSettings) -> Path | None:
    """Return the folder that the pool's workers published, or None if they had no tokenizer.

    Raises:
        StoreUnavailable: the object store does not answer now.
    """
    if not pool.tokenizer:
        return None
    try:
        folder = await asyncio.to_thread(_folder, settings.blob_store, settings.data_dir, pool)
    except BlobsUnavailable as unavailable:
        raise StoreUnavailable("The tokenizer cannot be read now.") from unavailable
    if (folder / _READ_FIRST).exists():
        return folder.absolute()
    log.warning("tokenizer_missing", pool=pool.id, folder=str(folder))
    return None


def _folder(blobs: Blobs, data_dir: Path, pool: PoolRecord) -> Path:
    """Return a tokenizer's local folder, downloading it from an object store. Its name is a content
    hash, so it never changes.
    """
    if blobs.folder:
        return blobs.folder / "tokenizers" / pool.tokenizer
    of_pool, here = blobs.below(f"tokenizers/{pool.tokenizer}"), Folder(data_dir / "tokenizers")
    if not here.exists(f"{pool.tokenizer}/{_READ_FIRST}"):
        keys = sorted((blob.key for blob in of_pool.list()), key=lambda key: key == _READ_FIRST)
        for key in keys:  # the last file marks the folder as complete
            here.put(f"{pool.tokenizer}/{key}", of_pool.get(key))
    return data_dir / "tokenizers" / pool.tokenizer


async def tokenizer_folder(pool: PoolRecord, settings: ServerSettings) -> Path:
    """Return the folder that the pool's workers published. Raises Invalid if there is none, or
    StoreUnavailable.
    """
    folder = await published_tokenizer(pool, settings)
    if folder is None:
        raise Invalid(
            f"{pool.base_model} has no tokenizer here, so it reads and writes token ids only."
        )
    return folder


async def language_of(pool: PoolRecord, settings: ServerSettings) -> Language:
    """Return the language that the pool's workers published. Raises Invalid if there is none, or
    StoreUnavailable.
    """
    return await asyncio.to_thread(_current, await tokenizer_folder(pool, settings))


def _current(folder: Path) -> Language:
    # A starting worker rewrites its pool's folder.
    return _read(folder, (folder / _READ_FIRST).stat().st_mtime_ns)


@lru_cache(maxsize=_KEPT)
def _read(folder: Path, written_at_ns: int) -> Language:
    try:
        template = ChatTemplate.load(folder)
    except TemplateSyntaxError as error:
        log.warning("chat_template_unusable", folder=str(folder), reason=str(error))
        template = None
    return Language(Tokenizer.load(folder), template)
