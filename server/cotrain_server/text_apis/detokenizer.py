"""Turn words into tokens and back, with the tokenizer that a pool's worker wrote down.

Knows nothing of chats (`chat.py`) and needs no model library: the `tokenizers` wheel reads the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import tokenizers

from cotrain_server.errors import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

#: What a decoder shows for bytes that are no character, or not yet one.
PARTIAL = "\N{REPLACEMENT CHARACTER}"
#: Tokens that are decoded again with each new one, since a token's text can depend on those before.
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 32
#: A character has at most four bytes: what is no character after so many tokens never becomes one.
_UNFINISHED_TOKENS = 64


class Tokenizer:
    """One model's vocabulary."""

    def __init__(self, vocabulary: tokenizers.Tokenizer) -> None:
        # Both would change prompts behind our back; `transformers` ignores what the file says, too.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._vocabulary = vocabulary
        self._text_by_token: dict[int, str] = {}

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
        text: str = self._vocabulary.decode(list(tokens), skip_special_tokens=not special)
        return text

    def token_text(self, token: int) -> str:
        """Write one token for itself, a control token too."""
        text = self._text_by_token.get(token)
        if text is None:  # log-probs ask for the same few thousand tokens over and over
            text = self._text_by_token[token] = self.decode([token], special=True)
        return text


class TextGrowth:
    """The text of a growing row of tokens, in chunks that never end within a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were already given out

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens; the text that is certain now and was not before."""
        self._window.extend(tokens)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(PARTIAL)
        if len(self._window) > _UNFINISHED_TOKENS:
            certain = text
        new = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if len(self._window) > _WINDOW_TOKENS and certain == text:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._emitted = len(self._tokenizer.decode(self._window))
        return new

    def finish(self) -> str:
        """Give the rest: bytes that never became a character."""
        return self._tokenizer.decode(self._window)[self._emitted :]


class VisibleText:
    """What the reader of one sequence sees: nothing from a stop string or a final token on."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], final_tokens: Iterable[int]
    ) -> None:
        self._growth = TextGrowth(tokenizer)
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
            return text[:at]
        shown = len(text) if at_end else len(text) - self._possible_start(text)
        self._pending = text[shown:]
        return text[:shown]

    def _possible_start(self, text: str) -> int:
        """Count the last characters of a text that may be the first ones of a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        counts = range(longest, 0, -1)
        return next((n for n in counts if any(s.startswith(text[-n:]) for s in self._stop)), 0)
