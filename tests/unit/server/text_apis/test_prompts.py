"""Limits of text length, checked before any tokenization."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from cotrain_server.errors import Invalid
from cotrain_server.parser import THREAD_ABOVE
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis import prompts
from cotrain_server.text_apis.openai_requests import ChatCompletionRequest, CompletionRequest
from cotrain_server.text_apis.prompts import Target, chat_body, longest_text, prompt_bodies, text_weight
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_server.text_apis.tokenizer_cache import Language, language_of
from cotrain_store.bodies.sample_body import SampleBody
from tests.support.http_api import POOL
from tests.support.talking import write_language
from tests.support.tiny_tokenizers import SPECIAL_TOKENS, trained_tokenizer

SAMPLER: Any = None
LARGE = replace(POOL, max_sequence_tokens=32_768)


@pytest.fixture
async def target(tmp_path: Path) -> Target:
    write_language(tmp_path)
    settings = ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)
    return Target(POOL, await language_of(POOL, settings), SAMPLER)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each tokenized text."""
    lengths: list[int] = []

    def encode(_: Tokenizer, text: str, *, special: bool) -> list[int]:
        lengths.append(len(text))
        return [1, 2] if special else [2]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    return lengths


def bodies(target: Target, *given: str | list[int], echo: bool = False) -> list[SampleBody]:
    asked = CompletionRequest(model="m", prompt=list(given))
    return prompt_bodies(target, asked.prompts, asked.body, echo=echo)[0]


def chat(target: Target, *texts: str) -> SampleBody:
    messages = [{"role": "user", "content": text} for text in texts]
    asked = ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
    return chat_body(target, asked.chat(), asked.body)[0]


def test_the_maximum_text_length_grows_with_the_context() -> None:
    assert longest_text(POOL) == 65_536
    assert longest_text(LARGE) == 524_288


def test_a_text_of_ten_million_characters_is_never_tokenized(target: Target, cut: list[int]) -> None:
    """Measured: it took 34 s and 2 GB."""
    vast = "x" * 10_000_000
    sentence = "has 10000000 characters. tiny/model .* up to 64 tokens, .* at most 65536 characters"
    with pytest.raises(Invalid, match=rf"^prompt {sentence}"):
        bodies(target, "short", vast)
    with pytest.raises(Invalid, match=rf"^messages {sentence}"):
        chat(target, vast)
    assert cut == []


def test_the_length_of_messages_is_limited_in_total(target: Target, cut: list[int]) -> None:
    with pytest.raises(Invalid, match=r"^messages has 70000 characters"):
        chat(target, *["x" * 7_000] * 10)
    assert cut == []


def test_the_output_of_a_template_is_limited_too(
    target: Target, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "ALWAYS_READ", 20)
    monkeypatch.setattr(prompts, "CHARACTERS_PER_TOKEN", 0)
    with pytest.raises(Invalid, match=r"^messages "):
        chat(target, *["Hi"] * 10)
    assert cut == []


def test_many_prompts_are_limited_in_total(target: Target, cut: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_CHARACTERS", 100_000)
    assert len(bodies(target, *["x" * 50_000] * 2)) == 2
    with pytest.raises(Invalid, match=r"^prompt: the texts .* 100000 characters together, not 150000"):
        bodies(target, *["x" * 50_000] * 3)
    assert cut == [50_000] * 2


def test_tokens_are_counted_before_they_are_decoded(
    target: Target, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(Tokenizer, "decode", refuse)
    with pytest.raises(Invalid, match="prompt has 65 tokens"):
        bodies(target, [1] * 65, echo=True)
    assert cut == []


def test_text_is_never_tokenized_in_the_event_loop() -> None:
    assert text_weight(0) > THREAD_ABOVE
    assert text_weight(1_000_000) > text_weight(1_000)


def test_a_model_without_a_chat_template_is_reported(target: Target) -> None:
    mute = replace(target, language=replace(target.language, template=None))
    with pytest.raises(Invalid, match="no chat template"):
        chat(mute, "Hi")


def test_the_first_token_of_a_prompt_is_not_doubled() -> None:
    vocabulary = tokenizers.Tokenizer.from_str(trained_tokenizer(POOL.vocab_size))
    first = SPECIAL_TOKENS[1]
    vocabulary.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, vocabulary.token_to_id(first))]
    )
    target = Target(POOL, Language(Tokenizer(vocabulary), None), SAMPLER)
    plain, written = (bodies(target, text)[0].prompt for text in ("Hi", f"{first}Hi"))
    assert plain == written
    assert plain[0] == vocabulary.token_to_id(first) != plain[1]


def test_a_top_k_above_the_vocabulary_is_no_limit(target: Target) -> None:
    asked = CompletionRequest(model="m", prompt="Hi", top_k=POOL.vocab_size + 1)
    assert prompt_bodies(target, asked.prompts, asked.body, echo=False)[0][0].top_k == -1
