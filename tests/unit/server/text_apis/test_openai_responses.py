"""Log-probs as OpenAI's API writes them: entries for chats, columns for completions."""

from collections.abc import Sequence
from typing import Any

import tokenizers

from cotrain_server.text_apis.openai_responses import IMPOSSIBLE, ChatShape, CompletionShape, Shape, scored
from cotrain_server.text_apis.token_texts import TokenTexts
from cotrain_server.text_apis.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import sentencepiece_tokenizer, trained_tokenizer

EOS = 2
BYTE = 3
"""Token id of byte 0 in a fallback vocabulary."""
tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained_tokenizer(512)))
llama2 = Tokenizer(tokenizers.Tokenizer.from_str(sentencepiece_tokenizer(512, strips=True)))
(A,), (B,) = (tokenizer.encode(letter, special=False) for letter in "ab")


def written(
    shape: Shape,
    language: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    likeliest: Any = None,
    *,
    before: Sequence[int] = (),
) -> dict[str, Any]:
    texts = TokenTexts(language, [EOS], before, begins=not before)
    parts = texts.with_rest(texts.of_answer(tokens))
    return shape.logprobs(language, scored(tokens, logprobs, likeliest), parts)


def columns(tokens: Sequence[int], logprobs: Any, likeliest: Any = None) -> dict[str, Any]:
    return written(CompletionShape(), tokenizer, tokens, logprobs, likeliest)


def test_a_token_outside_the_top_k_is_listed_with_them() -> None:
    assert columns([A], [-3.0], [[(B, -0.5)]]) == {
        "tokens": ["a"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"b": -0.5, "a": -3.0}],
        "text_offset": [0],
    }


def test_offsets_count_the_preceding_characters() -> None:
    assert columns([A, B, A], [0.0] * 3)["text_offset"] == [0, 1, 2]
    assert columns([], [])["text_offset"] == []


def test_the_first_token_of_a_prompt_has_no_log_prob() -> None:
    told = columns([A, B], [None, -1.0], [None, [(B, -1.0)]])
    assert told["token_logprobs"] == [None, -1.0]
    assert told["top_logprobs"] == [None, {"b": -1.0}]


def test_infinity_is_written_as_a_number() -> None:
    (entry,) = written(ChatShape(), tokenizer, [A], [float("-inf")])["content"]
    assert entry == {"token": "a", "logprob": IMPOSSIBLE, "bytes": [97], "top_logprobs": []}


def test_tokens_that_are_part_of_a_character_keep_their_bytes() -> None:
    halves = tokenizer.encode("é", special=False)
    assert len(halves) == 2
    entries = written(ChatShape(), tokenizer, [*halves, EOS], [-1.0] * 3)["content"]
    assert [entry["token"] for entry in entries] == [
        "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>",
    ]  # fmt: skip
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], []]
    assert columns(halves, [-1.0] * 2)["tokens"] == ["", "é"]


def test_top_tokens_with_the_same_text_do_not_replace_each_other() -> None:
    (spelled,) = (token for token in range(259, 512) if llama2.token_name(token) == "a")
    byte = BYTE + ord("a")
    halves = [BYTE + 0xC3, BYTE + 0xA9, BYTE + 0xA8]
    alike = [(byte, -1.0), (spelled, -2.0), *((half, -3.0) for half in halves), (EOS, -4.0)]
    (named,) = written(CompletionShape(), llama2, [spelled], [-2.0], [alike])["top_logprobs"]
    assert named == {
        "a": -2.0,
        f"token_id:{byte}": -1.0,
        "bytes:\\xc3": -3.0,
        "bytes:\\xa9": -3.0,
        "bytes:\\xa8": -3.0,
        "</s>": -4.0,
    }


def test_every_token_of_a_vocabulary_has_its_own_key() -> None:
    for language in (tokenizer, llama2):
        everything = [(token, -1.0) for token in range(512)]
        told = written(CompletionShape(), language, [40], [-1.0], [everything])
        (named,) = told["top_logprobs"]
        assert len(named) == 512


def test_words_after_a_prompt_keep_their_space() -> None:
    prompt, words = llama2.encode("Once", special=True), llama2.encode("upon a", special=False)
    told = written(CompletionShape(), llama2, words, [-1.0] * len(words), before=prompt)
    assert "".join(told["tokens"]) == " upon a"
    assert told["text_offset"][-1] == len(" upon a") - len(told["tokens"][-1])


def test_a_message_starts_without_a_space_of_its_vocabulary() -> None:
    words = llama2.encode("upon a", special=False)
    likeliest = [[(words[0], -1.0)], *[None] * (len(words) - 1)]
    content = written(ChatShape(), llama2, words, [-1.0] * len(words), likeliest)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"upon a"
    assert content[0]["top_logprobs"] == [{name: content[0][name] for name in ("token", "logprob", "bytes")}]


def test_an_echoed_prompt_is_the_text_that_was_sent() -> None:
    for prompt in ("alphabet:", " two", "", "<s>a"):
        texts = TokenTexts(llama2, [EOS], begins=True)
        parts = texts.of_prompt(llama2.encode(prompt, special=True), prompt)
        assert "".join(part.text for part in parts) == prompt
