"""The official `anthropic` package against the served API, with a worker that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.http_api import ALICE, POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import CACHED_TOKENS, VOCABULARY, Script, Talking, ids, talking_api, write_language
from tests.support.waiting import PATIENCE_S

MODEL = POOL.base_model
HI: Any = {"model": MODEL, "max_tokens": 30, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = "u:Hi\na:"
WORDS = "Grüße 🙂 fin"


@pytest.fixture(scope="module")
def served(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    redis_server.flush()
    with talking_api(redis_server.url, tmp_path_factory.mktemp("data"), quotas={"samples": 2}) as talking:
        yield talking


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    text: str = block.text
    return text


def test_only_models_that_can_sample_are_listed(anthropic_client: anthropic.Anthropic) -> None:
    (model,) = anthropic_client.models.list()
    assert (model.id, model.display_name) == (MODEL, MODEL)


def test_a_message_is_answered(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    script.text = WORDS
    message = anthropic_client.messages.create(**HI)
    assert text_of(message) == WORDS
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    usage = message.usage
    assert usage.input_tokens + CACHED_TOKENS == len(ids(PROMPT))
    assert usage.cache_read_input_tokens == CACHED_TOKENS
    assert usage.output_tokens == len(ids(WORDS)) + 1
    assert script.seen[0].prompt == tuple(ids(PROMPT))


def test_a_message_is_streamed_in_whole_characters(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    script.text = WORDS
    with anthropic_client.messages.stream(**HI) as stream:
        said = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(said) == text_of(message) == WORDS
    assert len(said) > 4
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(ids(WORDS)) + 1
    assert script.seen[0].stream


def test_events_come_in_the_order_of_the_protocol(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    script.lost = frozenset({2})
    with anthropic_client.messages.create(**HI, stream=True) as stream:
        kinds = [event.type for event in stream]
    deltas = kinds.count("content_block_delta")
    assert deltas >= 2
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_sequence_is_reported_and_not_part_of_the_text(
    anthropic_client: anthropic.Anthropic, script: Script, is_streamed: bool
) -> None:
    script.text = "one, two, three"
    asked = {**HI, "stop_sequences": ["never", ", t"]}
    if is_streamed:
        with anthropic_client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = anthropic_client.messages.create(**asked)
    assert text_of(message) == "one"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", t")


def test_a_truncated_message_reports_it(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    message = anthropic_client.messages.create(**{**HI, "max_tokens": 2})
    assert message.stop_reason == "max_tokens"
    assert text_of(message) == VOCABULARY.decode(ids(script.text)[:2])


def test_a_message_that_fills_the_context_reports_it(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    script.cut_at = 3
    assert anthropic_client.messages.create(**HI).stop_reason == "model_context_window_exceeded"


def test_the_models_own_last_message_is_continued(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    turns = [*HI["messages"], {"role": "assistant", "content": "Well,"}]
    anthropic_client.messages.create(**{**HI, "system": "Be kind.", "messages": turns})
    assert script.seen[0].prompt == tuple(ids("s:Be kind.\nu:Hi\na:Well,"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"top_p": 2.0}}, "top_p"),
    ],
)
def test_an_invalid_request_is_rejected_and_names_its_field(
    anthropic_client: anthropic.Anthropic, script: Script, fields: Any, named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named) as refused:
        anthropic_client.messages.create(**{**HI, **fields})
    assert refused.value.type == "invalid_request_error"
    assert script.seen == []


def test_an_unknown_model_is_not_found(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="tiny/unknown"):
        anthropic_client.messages.create(**{**HI, "model": "tiny/unknown"})


def test_a_wrong_key_is_rejected(served: Talking) -> None:
    with (
        anthropic.Anthropic(
            base_url=f"{served.address}/anthropic/api", api_key="tml-wrong_key", max_retries=0
        ) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**HI)


@pytest.mark.parametrize("header", [{"x-api-key": ALICE}, {"Authorization": f"Bearer {ALICE}"}])
def test_a_key_is_accepted_in_either_header(served: Talking, script: Script, header: dict[str, str]) -> None:
    url = f"{served.address}/anthropic/api/v1/messages"
    answer = httpx.post(url, json=HI, headers=header, timeout=PATIENCE_S)
    assert answer.json()["content"] == [{"type": "text", "text": script.text}]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_failed_generation_is_an_error(
    anthropic_client: anthropic.Anthropic, script: Script, is_streamed: bool
) -> None:
    script.failure = "The weights are gone."
    with pytest.raises(anthropic.APIStatusError, match="The weights are gone") as failed:
        for _ in anthropic_client.messages.create(**HI, stream=is_streamed):
            pass
    assert failed.value.type == "invalid_request_error"


def test_an_idle_stream_sends_keepalive_events(
    served: Talking, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_server.text_apis.generation.IDLE_S", 0.01)
    script.is_holding = True
    url, headers = f"{served.address}/anthropic/api/v1/messages", {"x-api-key": ALICE}
    with httpx.stream("POST", url, json={**HI, "stream": True}, headers=headers) as answer:
        kinds = (line for line in answer.iter_lines() if line.startswith("event: "))
        assert [next(kinds) for _ in range(5)][2:] == ["event: ping"] * 3
    script.wait_for(cancelled=1)


@pytest.fixture
def data_dir(served: Talking) -> Iterator[Path]:
    """Folder of the worker's tokenizer, restored after the test."""
    folder = served.services.settings.data_dir
    yield folder
    write_language(folder)


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_a_model_without_a_usable_template_accepts_texts_but_no_chats(
    served: Talking, anthropic_client: anthropic.Anthropic, script: Script, data_dir: Path, template: str | None
) -> None:
    write_language(data_dir, template)
    with pytest.raises(anthropic.BadRequestError, match="no chat template"):
        anthropic_client.messages.create(**HI)
    text = httpx.post(
        f"{served.address}/oai/api/v1/completions",
        json={"model": MODEL, "prompt": "Hi"},
        headers={"x-api-key": ALICE},
        timeout=PATIENCE_S,
    )
    assert text.json()["choices"][0]["text"] == script.text


def test_a_model_without_a_tokenizer_accepts_only_token_ids(
    anthropic_client: anthropic.Anthropic, data_dir: Path
) -> None:
    (data_dir / "tokenizers" / POOL.tokenizer / "tokenizer.json").unlink()
    with pytest.raises(anthropic.BadRequestError, match="no tokenizer"):
        anthropic_client.messages.create(**HI)
