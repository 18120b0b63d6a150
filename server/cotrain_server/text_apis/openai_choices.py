"""How OpenAI's API writes a choice: one shape for completions, one for chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, Protocol

from cotrain_server.text_apis.detokenizer import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cotrain.wire.sampling import TopK
    from cotrain_server.text_apis.detokenizer import Tokenizer

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

    def opening(self) -> dict[str, Any] | None:
        """Start a streamed choice."""

    def chunk(self, text: str) -> dict[str, Any]:
        """Go on with a streamed choice."""

    def whole(self, text: str) -> dict[str, Any]:
        """Write a whole choice."""

    def logprobs(
        self, tokenizer: Tokenizer, scored: Sequence[Scored], offset: int
    ) -> dict[str, Any]:
        """Write log-probs of some tokens, the first of which starts `offset` characters in."""


class ChatShape:
    """chat/completions: a message."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

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
        self, tokenizer: Tokenizer, scored: Sequence[Scored], offset: int
    ) -> dict[str, Any]:
        """Write one entry per token."""
        content = [
            {
                **_entry(tokenizer, each.token, each.logprob),
                "top_logprobs": [_entry(tokenizer, *likely) for likely in each.likeliest or ()],
            }
            for each in scored
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """completions: a text."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> None:
        """Need no beginning."""

    def chunk(self, text: str) -> dict[str, Any]:
        """Write some more of the text."""
        return {"text": text}

    def whole(self, text: str) -> dict[str, Any]:
        """Write the text."""
        return {"text": text}

    def logprobs(
        self, tokenizer: Tokenizer, scored: Sequence[Scored], offset: int
    ) -> dict[str, Any]:
        """Write columns. A token is always among its likeliest, be there one more than asked for."""
        texts = [tokenizer.token_text(each.token) for each in scored]
        likeliest = [
            None
            if each.likeliest is None
            else {
                tokenizer.token_text(token): _finite(logprob)
                for token, logprob in reversed([*each.likeliest, (each.token, each.logprob)])
            }
            for each in scored
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in scored],
            "top_logprobs": likeliest if any(likeliest) else None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }


def scored(
    tokens: Iterable[int],
    logprobs: Iterable[float | None],
    likeliest: Iterable[TopK | None] | None,
) -> list[Scored]:
    """Put together what belongs to each token."""
    filled = chain(likeliest or (), repeat(None))
    return [Scored(*each) for each in zip(tokens, logprobs, filled, strict=False)]


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    text = tokenizer.token_text(token)
    # The bytes of a token that is only part of a character are lost once it is text.
    in_bytes = None if PARTIAL in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": in_bytes}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, IMPOSSIBLE)
