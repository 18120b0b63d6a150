"""Text parts of single tokens, for the log-probs of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cotrain_server.text_apis.tokenizer_cache import TextGrowth, Tokenizer


@dataclass(frozen=True)
class Part:
    """Part of the text that one token adds."""

    text: str
    """The whole character for the token that completes it, nothing for the tokens before."""
    content: bytes
    """Bytes of the token itself; empty for a token that is not part of the text."""
    offset: int
    """Number of preceding characters."""
    begins: bool
    """True if the text begins with it and loses a first space."""


class TokenTexts:
    """Parts of one text, token by token. Joined, they are the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        final_tokens: Iterable[int],
        before: Sequence[int] = (),
        *,
        begins: bool = False,
    ) -> None:
        """Create an empty text, like `VisibleText`."""
        self._tokenizer = tokenizer
        self._final = frozenset(final_tokens)
        self._growth = TextGrowth(tokenizer, before, begins=begins)
        self._length = 0

    def of_prompt(self, prompt: Sequence[int], echo: str) -> list[Part]:
        """Add a prompt with the visible text `echo`, which excludes tokens that the tokenizer put
        before it.
        """
        added = 0
        if self._tokenizer.decode(prompt, special=True) != echo:
            added = self._tokenizer.count_added_before(prompt)
        hidden = [Part("", b"", 0, begins=True)] * added
        return hidden + [self._add(token, special=True) for token in prompt[added:]]

    def of_answer(self, tokens: Sequence[int]) -> list[Part]:
        """Add tokens of the answer. Control tokens and final tokens have no text."""
        return [
            Part("", b"", self._length, self._growth.begins)
            if token in self._final
            else self._add(token, special=False)
            for token in tokens
        ]

    def ended(self, parts: list[Part]) -> list[Part]:
        """Return all parts. The last one also gets the rest of the text: bytes of incomplete
        characters.
        """
        return parts and [
            *parts[:-1],
            replace(parts[-1], text=parts[-1].text + self._growth.finish()),
        ]

    def _add(self, token: int, *, special: bool) -> Part:
        tokenizer, begins, offset = self._tokenizer, self._growth.begins, self._length
        text, content = self._growth.push([token], special=special), b""
        if tokenizer.has_text(token, special=special):
            content = tokenizer.token_bytes(token, begins=begins)
        self._length += len(text)
        return Part(text, content, offset, begins)
