"""Log-probs as OpenAI's API writes them: entries for chats, columns for completions."""

from __future__ import annotations

from typing import Any

import tokenizers

from cotrain_server.text_apis.detokenizer import Tokenizer
from cotrain_server.text_apis.openai_choices import IMPOSSIBLE, ChatShape, CompletionShape, scored
from tests.support.tiny_models import trained_tokenizer

tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained_tokenizer(512)))
(A,), (B,) = (tokenizer.encode(letter, special=False) for letter in "ab")


def columns(*tokens: Any, offset: int = 0) -> dict[str, Any]:
    return CompletionShape().logprobs(tokenizer, scored(*tokens), offset)


def test_a_token_that_was_not_likely_is_named_with_those_that_were() -> None:
    written = columns([A], [-3.0], [[(B, -0.5)]], offset=4)
    assert written == {
        "tokens": ["a"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"b": -0.5, "a": -3.0}],
        "text_offset": [4],
    }


def test_offsets_count_the_characters_before() -> None:
    assert columns([A, B, A], [0.0] * 3, None, offset=10)["text_offset"] == [10, 11, 12]
    assert columns([], [], None)["text_offset"] == []


def test_the_first_token_of_all_has_no_log_prob() -> None:
    written = columns([A, B], [None, -1.0], [None, [(B, -1.0)]])
    assert written["token_logprobs"] == [None, -1.0]
    assert written["top_logprobs"] == [None, {"b": -1.0}]


def test_infinity_is_written_as_a_number() -> None:
    written = ChatShape().logprobs(tokenizer, scored([A], [float("-inf")], None), 0)
    (entry,) = written["content"]
    assert entry == {"token": "a", "logprob": IMPOSSIBLE, "bytes": [97], "top_logprobs": []}
