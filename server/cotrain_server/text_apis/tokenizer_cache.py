"""What it takes to talk with a base model: its tokenizer and chat template, read once per process.

Turn words into tokens and back, with the tokenizer that a pool's worker wrote down.

Knows nothing of chats (`chat.py`) and needs no model library: the `tokenizers` wheel reads the file.
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

#: Stands for bytes that are no character.
PARTIAL = "\N{REPLACEMENT CHARACTER}"
#: How SentencePiece spells a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
#: A character has at most four bytes, so these hold all of the one that a text ends in.
_TOKENS_BEFORE = 4


class Tokenizer:
    """One model's vocabulary."""

    def __init__(self, vocabulary: tokenizers.Tokenizer) -> None:
        # Both would change prompts behind our back; `transformers` ignores what the file says, too.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._vocabulary = vocabulary
        added = vocabulary.get_added_tokens_decoder()
        self._special = {token: one.content for token, one in added.items() if one.special}
        self._bytes_of = byte_reader(vocabulary)
        self._raw: dict[int, bytes | None] = {}
        self._full: dict[int, bytes] = {}
        self.drops_first_space, self.text_start = self._probe_first_space()
        """Whether a text loses the space of its first token; a token without text to decode others behind."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json`; raises OSError where there is none."""
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return cls(tokenizers.Tokenizer.from_str(text))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Cut text into tokens; `special` adds what the model wants at the start of a plain text.

        A million characters take seconds: call it in a thread.

        Raises:
            Unreadable: half a surrogate pair, which JSON can hold and UTF-8 cannot.
        """
        try:
            # Unlike `encode`, this lets other threads run.
            [cut] = self._vocabulary.encode_batch_fast([text], add_special_tokens=special)
        except TypeError as error:
            raise Unreadable("The text is not valid Unicode: it holds half a character.") from error
        ids: list[int] = cut.ids
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Put tokens together to text; without `special`, control tokens have none."""
        growth = TextGrowth(self, begins=True)
        return growth.push(tokens, special=special) + growth.finish()

    def without_first_space(self, text: str) -> str:
        """Return the beginning of a text as it stands alone: some vocabularies put a space before each word."""
        return text.removeprefix(" ") if self.drops_first_space else text

    def is_special(self, token: int) -> bool:
        """Return whether a token is a control token."""
        return token in self._special

    def has_text(self, token: int, *, special: bool = False) -> bool:
        """Return whether a token adds to a text; a control token does with `special` alone."""
        return special if self.is_special(token) else self.raw_bytes(token) != b""

    def last_with_text(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens that have text, as many as the next one can depend on."""
        seen = (token for token in reversed(tokens) if self.has_text(token))
        return list(islice(seen, _TOKENS_BEFORE))[::-1]

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that may be part of a character; None for one that is text."""
        try:
            return self._raw[token]
        except KeyError:
            spelled = self._vocabulary.id_to_token(token)
            raw = self._raw[token] = b"" if spelled is None else self._bytes_of(spelled)
            return raw

    def count_added_before(self, prompt: Sequence[int]) -> int:
        """Count the control tokens at a prompt's beginning that `encode` puts before any text."""
        added = self.encode("", special=True)
        return next(
            (at for at, (a, b) in enumerate(zip(added, prompt, strict=False)) if a != b),
            min(len(added), len(prompt)),
        )

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """Return what a token adds to a text that has begun, or that `begins`; for a control token its name."""
        found = self._full.get(token)
        if found is None:  # log-probs ask for the same few thousand tokens over and over
            raw = self._special[token].encode() if token in self._special else self.raw_bytes(token)
            found = self.text_behind(self.text_start, [token]).encode() if raw is None else raw
            self._full[token] = found
        return found.removeprefix(b" ") if begins and self.drops_first_space else found

    def token_name(self, token: int, *, begins: bool = False) -> str:
        """Write one token for itself: part of a character as OpenAI's API does, a control token by its name."""
        content = self.token_bytes(token, begins=begins)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def text_behind(self, before: list[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add to that of others; none of them a part of a character."""
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
    """The text of a growing row of tokens, in chunks that never end within a character.

    Each token is read once: bytes by an incremental decoder of UTF-8, so that a byte which is no part of a
    character spoils no neighbour, and text behind the token before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, begins: bool = False
    ) -> None:
        """Begin behind the tokens `before`, which have no part in the text; with `begins` it stands alone."""
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = tokenizer.text_start
        self.begins = False
        self.push(tokenizer.last_with_text(before))
        self.begins = begins
        """Whether the next token is the first one, whose space some vocabularies drop."""

    def push(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Add tokens; return the text that is certain now and was not before. `special` shows control tokens."""
        visible = (token for token in tokens if self._tokenizer.has_text(token, special=special))
        return "".join(self._grow(kind, list(run)) for kind, run in groupby(visible, self._kind))

    def finish(self) -> str:
        """Return the rest: bytes that never became a character."""
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
    """What the reader of one sequence sees: nothing from a stop string or a final token on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        final_tokens: Iterable[int],
        *,
        before: Sequence[int] = (),
        begins: bool = False,
    ) -> None:
        """Begin behind the tokens `before`; with `begins` the text stands alone all the same."""
        self._growth = TextGrowth(tokenizer, before)
        self._tokenizer = tokenizer
        self._begins = begins
        self._stop = tuple(stop)
        self._final = frozenset(final_tokens)
        self._pending = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text; None until one does."""

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens; the text that may be shown now. What could begin a stop string waits."""
        grown = self._growth.push(token for token in tokens if token not in self._final)
        return self._show(self._pending + grown, at_end=False)

    def finish(self) -> str:
        """Give what is left once no more tokens come."""
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
        """Count the last characters of a text that may be the first ones of a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        counts = range(longest, 0, -1)
        return next((n for n in counts if any(s.startswith(text[-n:]) for s in self._stop)), 0)


log = structlog.get_logger()

_READ_FIRST = "tokenizer.json"
#: Languages kept in memory; one of a large vocabulary takes about 100 MB.
_KEPT = 8


@dataclass(frozen=True)
class Language:
    """How one base model reads and writes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


async def published_tokenizer(pool: PoolRecord, settings: ServerSettings) -> Path | None:
    """Find the folder that the pool's workers wrote; None where they had nothing to write.

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
    """Name a tokenizer's folder; of objects, make it of them: it is named after its content, and never changes."""
    if blobs.folder:
        return blobs.folder / "tokenizers" / pool.tokenizer
    of_pool, here = blobs.below(f"tokenizers/{pool.tokenizer}"), Folder(data_dir / "tokenizers")
    if not here.exists(f"{pool.tokenizer}/{_READ_FIRST}"):
        keys = sorted((blob.key for blob in of_pool.list()), key=lambda key: key == _READ_FIRST)
        for key in keys:  # the last one says that all are there
            here.put(f"{pool.tokenizer}/{key}", of_pool.get(key))
    return data_dir / "tokenizers" / pool.tokenizer


async def tokenizer_folder(pool: PoolRecord, settings: ServerSettings) -> Path:
    """Find the folder that the pool's workers wrote; raises Invalid where there is none, StoreUnavailable."""
    folder = await published_tokenizer(pool, settings)
    if folder is None:
        raise Invalid(
            f"{pool.base_model} has no tokenizer here, so it reads and writes token ids only."
        )
    return folder


async def language_of(pool: PoolRecord, settings: ServerSettings) -> Language:
    """Read what the pool's workers wrote down; raises Invalid where they had nothing to write, StoreUnavailable."""
    return await asyncio.to_thread(_current, await tokenizer_folder(pool, settings))


def _current(folder: Path) -> Language:
    # A worker that starts writes its pool's folder anew.
    return _read(folder, (folder / _READ_FIRST).stat().st_mtime_ns)


@lru_cache(maxsize=_KEPT)
def _read(folder: Path, written_at_ns: int) -> Language:
    try:
        template = ChatTemplate.load(folder)
    except TemplateSyntaxError as error:
        log.warning("chat_template_unusable", folder=str(folder), reason=str(error))
        template = None
    return Language(Tokenizer.load(folder), template)
