"""How OpenAI's API writes a choice: one shape for completions, one for chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cotrain.wire.sampling import TopK
    from cotrain_server.text_apis.detokenizer import Tokenizer
    from cotrain_server.text_apis.token_texts import Part

#: What OpenAI's API writes for a token that is all but impossible; JSON has no infinity.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True)
class Scored:
    """One token, how likely it was, and what would have been likeliest in its place."""

    token: int
    logprob: float | None
    """None: the first token of all, which nothing comes before."""
    likeliest: TopK | None


class Shape(Protocol):
    """What tells the two kinds of answer apart."""

    prefix: str
    whole_object: str
    chunk_object: str
    begins: bool
    """Whether its text stands alone, as the words of a message do, or goes on with the prompt's."""

    def opening(self) -> dict[str, Any] | None:
        """Start a streamed choice."""

    def chunk(self, text: str) -> dict[str, Any]:
        """Go on with a streamed choice."""

    def whole(self, text: str) -> dict[str, Any]:
        """Write a whole choice."""

    def logprobs(
        self, tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]
    ) -> dict[str, Any]:
        """Write log-probs of some tokens, and the part of the text that each adds."""


class ChatShape:
    """chat/completions: a message."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    begins = True

    def opening(self) -> dict[str, Any]:
        """Say who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk(self, text: str) -> dict[str, Any]:
        """Write some more of the message."""
        return {"delta": {"content": text} if text else {}}

    def whole(self, text: str) -> dict[str, Any]:
        """Write the message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(
        self, tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]
    ) -> dict[str, Any]:
        """Write one entry per token. The bytes of all entries are those of the text."""
        content = [
            {
                **_entry(tokenizer, each.token, each.logprob, part),
                "bytes": list(part.content),
                "top_logprobs": [
                    _entry(tokenizer, *likely, part) for likely in each.likeliest or ()
                ],
            }
            for each, part in zip(scored, parts, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """completions: a text."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    begins = False

    def opening(self) -> None:
        """Need no beginning."""

    def chunk(self, text: str) -> dict[str, Any]:
        """Write some more of the text."""
        return {"text": text}

    def whole(self, text: str) -> dict[str, Any]:
        """Write the text."""
        return {"text": text}

    def logprobs(
        self, tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]
    ) -> dict[str, Any]:
        """Write columns. A token is always among its likeliest, be there one more than asked for."""
        likeliest = [
            None if each.likeliest is None else _named(tokenizer, each, begins=part.begins)
            for each, part in zip(scored, parts, strict=True)
        ]
        return {
            "tokens": [part.text for part in parts],
            "token_logprobs": [_finite(each.logprob) for each in scored],
            "top_logprobs": likeliest if any(likeliest) else None,
            "text_offset": [part.offset for part in parts],
        }


def scored(
    tokens: Iterable[int],
    logprobs: Iterable[float | None],
    likeliest: Iterable[TopK | None] | None,
) -> list[Scored]:
    """Put together what belongs to each token."""
    filled = chain(likeliest or (), repeat(None))
    return [Scored(*each) for each in zip(tokens, logprobs, filled, strict=False)]


def _named(tokenizer: Tokenizer, each: Scored, *, begins: bool) -> dict[str, float | None]:
    """Write the likeliest tokens by their names; of two with one name the less likely by its id."""
    own = (each.token, each.logprob)
    rows = [own, *(likely for likely in each.likeliest or () if likely[0] != each.token)]
    named: dict[str, float | None] = {}
    for token, logprob in rows:
        name = tokenizer.token_name(token, begins=begins)
        named[f"token_id:{token}" if name in named else name] = _finite(logprob)
    return named


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None, part: Part) -> dict[str, Any]:
    is_named = tokenizer.is_special(token)
    return {
        "token": tokenizer.token_name(token, begins=part.begins),
        "logprob": _finite(logprob),
        "bytes": [] if is_named else list(tokenizer.token_bytes(token, begins=part.begins)),
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, IMPOSSIBLE)
