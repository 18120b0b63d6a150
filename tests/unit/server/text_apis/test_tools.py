"""Tools of requests: both APIs give a template the same definitions and history, or name the field."""

from typing import Any

import pytest

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.anthropic_requests import CountRequest
from cotrain_server.text_apis.openai_requests import ChatCompletionRequest
from cotrain_server.text_apis.prompts import Chat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = {"role": "user", "content": "Hi"}


def openai_chat(messages: list[Any] | None = None, **fields: Any) -> Chat:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    asked = {"model": "m", "messages": messages or [HI], "tools": [tool], **fields}
    return ChatCompletionRequest.model_validate(asked).chat()


def anthropic_chat(messages: list[Any] | None = None, **fields: Any) -> Chat:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    asked = {"model": "m", "messages": messages or [HI], "tools": [tool], **fields}
    return CountRequest.model_validate(asked).chat()


def test_both_apis_give_one_chat_to_the_template() -> None:
    function = {"name": "f", "arguments": '{"city": "Bern"}'}
    mine = openai_chat([
        HI,
        {
            "role": "assistant", "content": None, "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ])  # fmt: skip
    other = anthropic_chat([
        HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "a1", "name": "f", "input": {"city": "Bern"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a1", "content": "rain"},
            {"type": "text", "text": "And?"},
        ]},
    ])  # fmt: skip
    assert mine == other
    assert mine.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        ({}, {}, ("auto", None, False)),
        ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}, ("required", None, False)),
        (
            {"parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("auto", None, True),
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tool_choice": {"type": "tool", "name": "f"}},
            ("required", "f", None),
        ),
    ],
)
def test_a_choice_has_one_meaning_in_both_apis(
    mine: dict[str, Any], other: dict[str, Any], expected: tuple[str, str | None, bool | None]
) -> None:
    for chat in (openai_chat(**mine), anthropic_chat(**other)):
        tools = chat.tools
        assert (tools.choice, tools.name) == expected[:2]
        assert expected[2] in (None, tools.is_single)


def test_the_choice_none_hides_the_tools() -> None:
    assert openai_chat(tool_choice="none").tools.functions == ()
    assert anthropic_chat(tool_choice={"type": "none"}).tools.functions == ()


F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: only"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\].function.na"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "schema"),
        ({"tools": [F, F]}, "'f' occurs more than once"),
        ({"tools": [F] * 129}, "limit is 128"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: tools is empty"),
        ({"tool_choice": "sometimes"}, "tool_choice must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "no function of this"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            r"messages\[0\].tool_calls\[0\] must have",
        ),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_to_clients_of_openai(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        openai_chat(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "later"}}, "thinking.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, r"content\[0\]"),
    ],
)
def test_a_wrong_field_is_named_to_clients_of_anthropic(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        anthropic_chat(**fields)
