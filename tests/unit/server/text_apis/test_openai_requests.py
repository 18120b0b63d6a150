"""Requests of OpenAI's clients: converted to a sample request, or refused by the name of the field."""

from typing import Any

import pytest
from pydantic import ValidationError

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.openai_requests import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "Hi", **fields})


def test_null_and_omitted_fields_have_the_same_meaning() -> None:
    fields = set(ChatCompletionRequest.model_fields) - {"model", "messages"}
    given = chat(**dict.fromkeys(fields))
    given.check()
    assert given.body([1]) == chat().body([1])


def test_defaults_are_those_of_the_api() -> None:
    body = chat().body([1, 2])
    assert (body.prompt, body.num_samples, body.max_tokens) == ((1, 2), 1, None)
    assert (body.temperature, body.top_p, body.top_k, body.stop) == (1.0, 1.0, -1, None)
    assert not body.stream
    assert completion().body([1]).max_tokens == 16


def test_all_fields_are_copied_to_the_sample_request() -> None:
    asked = chat(
        n=3, temperature=0, top_p=0.5, top_k=7, seed=-4, stop=["a", "b"], stream=True,
        max_tokens=5, max_completion_tokens=6,
    )  # fmt: skip
    body = asked.body([1])
    assert (body.num_samples, body.max_tokens, body.seed) == (3, 6, -4)
    assert (body.temperature, body.top_p, body.top_k) == (0, 0.5, 7)
    assert body.stop == ("a", "b")
    assert body.stream


def test_top_logprobs_are_requested_without_token_streaming() -> None:
    body = chat(stream=True, logprobs=True, top_logprobs=4).body([1])
    assert (body.topk_sample_logprobs, body.stream) == (4, False)
    assert completion(stream=True, logprobs=0).body([1]).stream


def test_echoed_log_probs_are_those_of_the_prompt() -> None:
    body = completion(echo=True, logprobs=2).body([1, 2])
    assert (body.prompt_logprobs, body.topk_prompt_logprobs) == (True, 2)
    assert not completion(echo=True).body([1]).prompt_logprobs


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        ([1, 2], [[1, 2]]),
        (["Hi", "1"], ["Hi", "1"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["Hi", [3]], ["Hi", [3]]),
    ],
)
def test_a_prompt_may_have_any_of_five_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["x"] * 257])
def test_no_prompt_and_too_many_prompts_are_refused(prompt: list[str]) -> None:
    with pytest.raises(Invalid, match="prompt must have 1 to 256"):
        _ = completion(prompt=prompt).prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"1": 5}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"modalities": ["text", "audio"]},
        {"best_of": 2},
        {"nobody_knows_this": 1},
    ],
)
def test_a_field_that_would_change_the_result_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(fields))):
        chat(**fields).check()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "stop_token_ids": []},
        {"use_beam_search": False, "length_penalty": 1.0, "add_generation_prompt": True},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    ],
)
def test_a_field_without_effect_is_ignored(fields: dict[str, Any]) -> None:
    chat(**fields).check()


def test_values_of_other_servers_have_their_meaning() -> None:
    body = chat(top_p=0, top_k=0, seed=-1).body([1])
    assert (body.top_k, body.seed) == (-1, None)
    assert 0 < body.top_p < 1e-6
    assert completion(logprobs=False).logprobs is None


def test_top_logprobs_without_logprobs_are_refused() -> None:
    with pytest.raises(Invalid, match="top_logprobs needs logprobs"):
        chat(top_logprobs=1).check()


def test_log_probs_of_a_prompt_are_not_streamed() -> None:
    completion(echo=True, stream=True).check()
    with pytest.raises(Invalid, match="echo"):
        completion(echo=True, stream=True, logprobs=0).check()


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 129}, {"top_logprobs": 21}, {"seed": 2**63}, {"messages": []}])
def test_numbers_have_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


def test_text_parts_are_joined_and_developer_messages_are_system_ones() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    seen_before: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    asked = chat(
        messages=[
            {"role": "developer", "content": "Be short.", "name": "me"},
            {"role": "user", "content": parts},
            seen_before,
        ]
    )
    assert asked.template_messages() == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "function", "content": "4"}, r"messages\[0\].role: 'function'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"messages\[0\].content\[0\]: .*'image_url'",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[0\].tool_calls"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]"),
    ],
)
def test_a_message_that_is_not_text_is_refused_by_its_index(message: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        chat(messages=[message]).template_messages()
