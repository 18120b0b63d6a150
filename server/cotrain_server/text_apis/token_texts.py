"""Text of an answer: the visible text so far, and the part of each token for log-probs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cotrain_server.text_apis.tokenizer import TextGrowth, Tokenizer


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that could start one of the markers."""
    longest = min(len(text), max(map(len, markers), default=0))
    counts = range(longest, 0, -1)
    return next((n for n in counts if any(m.startswith(text[-n:]) for m in markers)), 0)


class VisibleText:
    """Text of one sequence to show. It ends before a stop string, and final tokens are not part of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        final_tokens: Iterable[int],
        *,
        before: Sequence[int] = (),
        begins: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        """Create an empty text after the tokens `before`.

        With `begins`, it loses a first space as if nothing preceded it. `shown` are control tokens
        whose names are part of the text.
        """
        self._growth = TextGrowth(tokenizer, before, shown=shown)
        self._tokenizer = tokenizer
        self._begins = begins
        self._stop = tuple(stop)
        self._final = frozenset(final_tokens)
        self._pending = ""
        self.stopped_by: str | None = None
        """Stop string that ended the text; None if none did."""

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens, and return the further text to show. A possible start of a stop string is withheld."""
        grown = self._growth.push(token for token in tokens if token not in self._final)
        return self._show(self._pending + grown, at_end=False)

    def finish(self) -> str:
        """Return the withheld text after the last token."""
        return self._show(self._pending + self._growth.finish(), at_end=True)

    def _show(self, text: str, *, at_end: bool) -> str:
        if self.stopped_by is not None:
            return ""
        at, found = min(((text.find(stop), stop) for stop in self._stop if stop in text), default=(-1, None))
        if found is not None:
            self.stopped_by, self._pending = found, ""
            return self._without_first_space(text[:at])
        end = len(text) if at_end else len(text) - possible_start(text, self._stop)
        self._pending = text[end:]
        return self._without_first_space(text[:end])

    def _without_first_space(self, text: str) -> str:
        if not (self._begins and text):
            return text
        self._begins = False
        return self._tokenizer.without_first_space(text)


@dataclass(frozen=True)
class Part:
    """Part of the text that one token adds."""

    text: str  # empty for a token that does not complete its character
    content: bytes  # bytes of the token itself; empty for a token that is not part of the text
    offset: int  # number of characters of the text before it
    begins: bool  # True if no token with text precedes it, so that it loses a first space


class TokenTexts:
    """Text of one sequence, split into the parts of its tokens."""

    def __init__(
        self, tokenizer: Tokenizer, final_tokens: Iterable[int], before: Sequence[int] = (), *, begins: bool = False
    ) -> None:
        """Create an empty text, with the arguments of `VisibleText`."""
        self._tokenizer = tokenizer
        self._final = frozenset(final_tokens)
        self._growth = TextGrowth(tokenizer, before, begins=begins)
        self._length = 0

    def of_prompt(self, prompt: Sequence[int], echo: str) -> list[Part]:
        """Add a prompt of which the answer repeats the text `echo`, and return its parts.

        Control tokens that `encode` added at its start are not in `echo`. Their parts are empty.
        """
        added = 0
        if self._tokenizer.decode(prompt, special=True) != echo:
            added = self._tokenizer.count_added_before(prompt)
        hidden = [Part("", b"", 0, begins=True)] * added
        return hidden + [self._add(token, special=True) for token in prompt[added:]]

    def of_answer(self, tokens: Sequence[int]) -> list[Part]:
        """Add tokens of the answer, and return their parts. Those of control and final tokens are empty."""
        return [
            Part("", b"", self._length, self._growth.begins)
            if token in self._final
            else self._add(token, special=False)
            for token in tokens
        ]

    def with_rest(self, parts: list[Part]) -> list[Part]:
        """Return the parts at the end of the text, with bytes of an incomplete character in the last one."""
        return parts and [*parts[:-1], replace(parts[-1], text=parts[-1].text + self._growth.finish())]

    def _add(self, token: int, *, special: bool) -> Part:
        tokenizer, begins, offset = self._tokenizer, self._growth.begins, self._length
        text, content = self._growth.push([token], special=special), b""
        if tokenizer.has_text(token, special=special):
            content = tokenizer.token_bytes(token, begins=begins)
        self._length += len(text)
        return Part(text, content, offset, begins)
