"""A vocabulary like Llama 2's through every text endpoint: byte fallback, and a space before each word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from cotrain.commands.sample import stream
from tests.support.draws import variant
from tests.support.http_api import ALICE, POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import EOS, Script, Talking, talking_api
from tests.support.tiny_tokenizers import sentencepiece_tokenizer
from tests.support.ui import log_in

MODEL = POOL.base_model
VOCABULARY = Tokenizer.from_str(sentencepiece_tokenizer(POOL.vocab_size, strips=True))
HI: Any = [{"role": "user", "content": "Hi"}]
HANGUL = "가나다라마바사아자차카타"
BYTE = 3
"""The id of byte 0."""


@pytest.fixture(scope="module")
def served(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    redis_server.flush()
    with talking_api(redis_server.url, tmp_path_factory.mktemp("data"), VOCABULARY) as talking:
        yield talking


def ids(text: str) -> list[int]:
    tokens: list[int] = VOCABULARY.encode(text, add_special_tokens=False).ids
    return tokens


def completed(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[str]:
    """Return a completion's text at once, and as its stream adds up."""
    asked: Any = {"model": MODEL, "prompt": prompt, **fields}
    whole = client.completions.create(**asked).choices[0].text
    with client.completions.create(**asked, stream=True) as chunks:
        return [whole, "".join(chunk.choices[0].text for chunk in chunks)]


def messaged(client: anthropic.Anthropic, *turns: Any, **fields: Any) -> list[str]:
    """Return a message's text at once, and as its stream adds up."""
    asked: Any = {"model": MODEL, "max_tokens": 99, "messages": [*HI, *turns], **fields}
    (block,) = client.messages.create(**asked).content
    with client.messages.stream(**asked) as events:
        return [getattr(block, "text", ""), "".join(events.text_stream)]


def test_a_completion_goes_on_with_a_space(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = "a time"
    assert completed(openai_client, "Once upon") == [" a time"] * 2
    assert completed(openai_client, "Once upon", echo=True) == ["Once upon a time"] * 2
    assert completed(openai_client, ids("Once upon"), echo=True) == ["Once upon a time"] * 2
    assert completed(openai_client, "Once upon", stop=[" a", "never"]) == [""] * 2
    assert completed(openai_client, "Once upon", stop=[" ti"]) == [" a"] * 2


def test_without_a_prompt_there_is_no_word_to_part_from(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = "Once upon"
    assert completed(openai_client, "") == ["Once upon"] * 2
    assert completed(openai_client, [1]) == ["Once upon"] * 2


def test_an_answer_of_a_chat_begins_with_its_first_word(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, script: Script
) -> None:
    script.text = "a time"
    answer = openai_client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "a time"
    assert messaged(anthropic_client) == ["a time"] * 2
    assert messaged(anthropic_client, stop_sequences=[" t"]) == ["a"] * 2


def test_the_rest_of_a_message_goes_on_with_a_space(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    script.text = "a time"
    begun = {"role": "assistant", "content": "Once upon"}
    assert messaged(anthropic_client, begun) == [" a time"] * 2


@pytest.mark.parametrize("text", [variant(HANGUL), variant("€😀" * 14), f"one {HANGUL} two {HANGUL}\n👩‍👩‍👧!"])
def test_characters_of_several_tokens_are_streamed_whole(
    served: Talking, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, script: Script, text: str
) -> None:
    script.text = text
    assert completed(openai_client, "x", max_tokens=200) == [f" {text}"] * 2
    assert messaged(anthropic_client) == [text] * 2
    with openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True) as chunks:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with httpx.Client(base_url=served.address, headers={"X-API-Key": ALICE}) as http:
        assert "".join(stream(http, HI, {"model": MODEL})) == text


def test_a_stop_string_within_bytes_is_not_part_of_the_text(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = HANGUL
    assert completed(openai_client, "x", max_tokens=99, stop=["라마"]) == [" 가나다"] * 2


def test_bytes_that_are_no_character_spoil_none_beside_them(openai_client: openai.OpenAI, script: Script) -> None:
    content = "가나".encode() + b"\xff" + "다".encode() + b"\xeb"
    script.tokens = tuple(BYTE + byte for byte in content)
    assert completed(openai_client, "x") == ["가나�다�"] * 2


def test_log_probs_of_a_completion_add_up_to_its_text(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = "A b 漢!"
    for fields in ({}, {"echo": True}, {"max_tokens": 5}, {"echo": True, "max_tokens": 6}):
        asked: Any = {"model": MODEL, "prompt": "alphabet 漢:", "logprobs": 4, **fields}
        (choice,) = openai_client.completions.create(**asked).choices
        logprobs = choice.logprobs
        assert logprobs is not None
        tokens = logprobs.tokens or []
        assert "".join(tokens) == choice.text
        assert logprobs.text_offset == [len("".join(tokens[:at])) for at in range(len(tokens))]
        named = [each for each in logprobs.top_logprobs or [] if each]
        assert {len(each) for each in named} <= {4, 5}


def test_log_probs_of_a_streamed_completion_add_up_to_its_text(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = "A b 漢!"
    asked: Any = {"model": MODEL, "prompt": "alphabet:", "logprobs": 0, "stream": True}
    with openai_client.completions.create(**asked) as chunks:
        choices = [chunk.choices[0] for chunk in chunks]
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for logprobs in told for token in logprobs.tokens or []]
    assert "".join(tokens) == "".join(choice.text for choice in choices) == " A b 漢!"
    assert [offset for logprobs in told for offset in logprobs.text_offset or []] == [
        len("".join(tokens[:at])) for at in range(len(tokens))
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_bytes_of_a_chats_log_probs_are_those_of_its_text(
    openai_client: openai.OpenAI, script: Script, is_streamed: bool
) -> None:
    script.text = "A b 漢!"
    asked: Any = {"model": MODEL, "messages": HI, "logprobs": True}
    if is_streamed:
        with openai_client.chat.completions.create(**asked, stream=True) as chunks:
            told = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        told = [openai_client.chat.completions.create(**asked).choices[0].logprobs]
    entries = [entry for logprobs in told if logprobs for entry in logprobs.content or ()]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == script.text
    assert len(entries) == len(ids(script.text)) + len([EOS])


async def test_the_playground_shows_the_text_of_the_endpoints(served: Talking, script: Script) -> None:
    script.text = f"a {HANGUL}"
    async with httpx.AsyncClient(base_url=served.address) as http:
        await log_in(http, ALICE)
        headers = {"Accept": "application/json"}
        form = {"model-0": MODEL, "prompt": "Once", "max_tokens": "99", "seed": "1", "temperature": "1"}
        told = [
            (await http.post("/ui/playground", data={**form, "mode": mode}, headers=headers)).json()
            for mode in ("text", "chat")
        ]
    (text,), (chat,) = (each["answers"] for each in told)
    assert (text["text"], chat["text"]) == (f" {script.text}", script.text)
    assert [token["text"] for token in text["tokens"]][-4:] == [
        "bytes:\\xed", "bytes:\\x83", "타", "<unk>",
    ]  # fmt: skip
