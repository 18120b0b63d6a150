"""The official `openai` package against the served API, with a worker that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from cotrain_store.redis_client.connection import open_sync_connection
from tests.support.http_api import ALICE, POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import CACHED_TOKENS, EOS, VOCABULARY, Script, Talking, ids, talking_api

MODEL = POOL.base_model
HI: Any = [{"role": "user", "content": "Hi"}]
PROMPT = "u:Hi\na:"
WORDS = "Grüße 🙂 fin"


@pytest.fixture(scope="module")
def served(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    redis_server.flush()
    with talking_api(redis_server.url, tmp_path_factory.mktemp("data"), quotas={"samples": 4}) as talking:
        yield talking


@pytest.fixture
async def async_client(served: Talking) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{served.address}/oai/api/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=ALICE, max_retries=0) as opened:
        yield opened


def test_only_models_that_can_sample_are_listed(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_a_chat_is_answered(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = WORDS
    answer = openai_client.chat.completions.create(model=MODEL, messages=HI)
    (choice,) = answer.choices
    assert choice.message.content == WORDS
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert script.seen[0].prompt == tuple(ids(PROMPT))
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(ids(PROMPT))
    assert usage.completion_tokens == len(ids(WORDS)) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS


def test_a_chat_is_streamed_in_whole_characters(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = WORDS
    with openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    said = [delta.content for delta in deltas if delta.content]
    assert "".join(said) == WORDS
    assert len(said) > 4
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in said)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert script.seen[0].stream


async def test_an_async_client_streams_the_usage(async_client: openai.AsyncOpenAI, script: Script) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == {0: script.text, 1: script.text}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * (len(ids(script.text)) + 1)


def test_missed_stream_events_come_with_the_result(openai_client: openai.OpenAI, script: Script) -> None:
    script.text, script.lost = WORDS, frozenset({3})
    with openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
        said = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(said) == WORDS


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_is_not_part_of_the_text(openai_client: openai.OpenAI, script: Script, is_streamed: bool) -> None:
    script.text = "one, two, three"
    asked: Any = {"model": MODEL, "messages": HI, "stop": [", t", "never"]}
    if is_streamed:
        with openai_client.chat.completions.create(**asked, stream=True) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
        text, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        choice = openai_client.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == ("one", "stop")
    assert script.seen[0].stop == (", t", "never")


def test_a_truncated_text_reports_it(openai_client: openai.OpenAI, script: Script) -> None:
    answer = openai_client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == VOCABULARY.decode(ids(script.text)[:2])


def test_an_empty_answer_is_valid(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = ""
    answer = openai_client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probs_name_the_likeliest_tokens(openai_client: openai.OpenAI, script: Script, is_streamed: bool) -> None:
    script.text = "Hé"
    asked: Any = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
    if is_streamed:
        with openai_client.chat.completions.create(**asked, stream=True) as stream:
            told = [chunk.choices[0].logprobs for chunk in stream]
        content = [entry for logprobs in told if logprobs for entry in logprobs.content or ()]
    else:
        logprobs = openai_client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
    tokens = [*ids(script.text), EOS]
    assert [entry.logprob for entry in content] == [-float(token) for token in tokens]
    assert content[0].token == "H"
    assert content[0].bytes == list(b"H")
    assert content[-1].token == "<|endoftext|>"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(tokens)
    assert content[0].top_logprobs[1].token == "<|im_start|>"
    assert [entry.bytes for entry in content[1:]] == [[0xC3], [0xA9], []]


def test_log_probs_of_streamed_tokens_come_with_them(openai_client: openai.OpenAI, script: Script) -> None:
    asked: Any = {"model": MODEL, "messages": HI, "logprobs": True}
    with openai_client.chat.completions.create(**asked, stream=True) as stream:
        told = [chunk.choices[0].logprobs for chunk in stream]
    entries = [entry for logprobs in told if logprobs for entry in logprobs.content or ()]
    assert [entry.token for entry in entries] == [
        *[VOCABULARY.decode([token]) for token in ids(script.text)],
        "<|endoftext|>",
    ]
    assert script.seen[0].stream


def test_tokens_of_the_result_are_streamed_in_chunks(
    openai_client: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_server.text_apis.generation.CHUNK_TOKENS", 2)
    script.text = WORDS
    asked: Any = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 1}
    with openai_client.chat.completions.create(**asked, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == WORDS
    sizes = [len(choice.logprobs.content or []) for choice in choices if choice.logprobs]
    assert max(sizes) == 2
    assert sum(sizes) == len(ids(WORDS)) + 1


def test_every_prompt_has_its_choices(openai_client: openai.OpenAI, script: Script) -> None:
    prompts: Any = ["Hi", ids("there")]
    answer = openai_client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=1, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"H"}
    assert sorted(body.prompt for body in script.seen) == sorted([tuple(ids("Hi")), tuple(ids("there"))])
    assert {body.seed for body in script.seen} == {5}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens == len(ids("Hi") + ids("there"))


def test_a_completion_echoes_its_prompt_with_log_probs(openai_client: openai.OpenAI, script: Script) -> None:
    """The request that evaluation harnesses send."""
    answer = openai_client.completions.create(model=MODEL, prompt="Hi you", echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer.choices
    assert choice.text == "Hi youH"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "Hi youH"
    assert logprobs.token_logprobs == [None, *[-float(t) for t in ids("Hi you")[1:] + ids("H")]]
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == len(logprobs.tokens or [])
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6]


def test_a_streamed_completion_can_echo(openai_client: openai.OpenAI, script: Script) -> None:
    with openai_client.completions.create(model=MODEL, prompt="Hi you", echo=True, stream=True) as stream:
        texts = [chunk.choices[0].text for chunk in stream]
    assert texts[0] == "Hi you"
    assert "".join(texts) == "Hi you" + script.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra_body": {"tools": [{"type": "function"}]}}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [{"role": "function", "content": "4", "name": "x"}]}, "role: 'function'"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"messages": [{"role": "user", "content": "word " * 99}]}, "maximum context length is"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ],
)
def test_an_invalid_request_is_rejected_and_names_its_field(
    openai_client: openai.OpenAI, script: Script, fields: Any, named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        openai_client.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})
    assert refused.value.type == "invalid_request_error"
    is_long = "context" in named
    assert refused.value.code == ("context_length_exceeded" if is_long else "invalid")
    assert refused.value.param
    assert script.seen == []


@pytest.mark.parametrize("model", ["tiny/unknown", "tinker://nobody:train:0/sampler_weights/x", f"{MODEL};tiny/model"])
def test_an_unknown_model_is_not_found(openai_client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model=model, messages=HI)


@pytest.mark.parametrize("path", ["tinker://nonsense", f"{MODEL};tinker://a/b/c/d"])
def test_an_invalid_path_is_rejected(openai_client: openai.OpenAI, path: str) -> None:
    with pytest.raises(openai.BadRequestError):
        openai_client.chat.completions.create(model=path, messages=HI)


def test_a_wrong_key_is_rejected(served: Talking) -> None:
    base_url = f"{served.address}/oai/api/v1"
    with openai.OpenAI(base_url=base_url, api_key="tml-wrong_key", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_failed_generation_is_an_error(openai_client: openai.OpenAI, script: Script, is_streamed: bool) -> None:
    script.failure = "The weights are gone."
    asked: Any = {"model": MODEL, "messages": HI, "stream": is_streamed}
    with pytest.raises(openai.APIError, match="The weights are gone"):
        for _ in openai_client.chat.completions.create(**asked):
            pass


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(
    served: Talking, async_client: openai.AsyncOpenAI, script: Script, is_streamed: bool
) -> None:
    script.is_holding = True
    asking = asyncio.create_task(_read(async_client, is_streamed=is_streamed))
    await asyncio.to_thread(script.wait_for, seen=1)
    asking.cancel()
    await asyncio.wait({asking})
    await asyncio.to_thread(script.wait_for, cancelled=1)
    assert served.services.polls_by_tenant.total() == 0


async def test_a_full_queue_returns_a_retry_time(
    served: Talking, async_client: openai.AsyncOpenAI, script: Script
) -> None:
    script.is_holding = True
    quota = served.services.settings.quotas.samples
    waiting = [asyncio.create_task(_read(async_client, is_streamed=False)) for _ in range(quota)]
    await asyncio.to_thread(script.wait_for, seen=quota)
    with pytest.raises(openai.RateLimitError) as busy:
        await _read(async_client, is_streamed=True)
    assert float(busy.value.response.headers["retry-after"]) > 0
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await asyncio.to_thread(script.wait_for, cancelled=quota)


async def test_without_a_token_limit_the_whole_context_counts_for_the_quota(
    served: Talking, async_client: openai.AsyncOpenAI, script: Script, redis_server: EmbeddedRedis
) -> None:
    script.is_holding = True
    waiting = asyncio.create_task(_read(async_client, is_streamed=False))
    await asyncio.to_thread(script.wait_for, seen=1)
    with open_sync_connection(redis_server.url) as redis:
        (load,) = redis.scan_iter("cotrain:*:samples:*")
        assert int(redis.hget(load, "tokens") or 0) == POOL.max_sequence_tokens
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.to_thread(script.wait_for, cancelled=1)


async def _read(client: openai.AsyncOpenAI, *, is_streamed: bool) -> None:
    asked: Any = {"model": MODEL, "messages": HI, "stream": is_streamed}
    answer = await client.chat.completions.create(**asked)
    if is_streamed:
        async for _ in answer:
            pass
