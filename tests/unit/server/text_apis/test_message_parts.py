"""Parts of a message: the same, whatever segments its text arrives in."""

from typing import Any

import pytest

from cotrain_server.text_apis.message_parts import MessageFormat, MessageParts, Reasoning, Segment, text_in
from cotrain_server.text_apis.tools import Call, ToolForm, form_of

TOOLS: Any = {"f": {"properties": {"a": {"type": "string"}}}, "g": {}}
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "parameters": {}}'
FORM_CALLS = {"f": {"a": 1}, "g": {}}


def split(text: str, step: int, **format: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return reasoning, text and calls of a message that arrives in segments of `step` characters."""
    parts, segments = MessageParts(MessageFormat(tools=TOOLS, **format)), list[Segment]()
    for at in range(0, len(text), step):
        segments += parts.push(text[at : at + step])
    segments += parts.finish()
    calls = [segment for segment in segments if isinstance(segment, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    reasoning = "".join(each.text for each in segments if isinstance(each, Reasoning))
    return reasoning, text_in(segments), [(call.name, call.arguments) for call in calls]


HERMES, LLAMA, MISTRAL = ToolForm.HERMES, ToolForm.LLAMA, ToolForm.MISTRAL
XML = "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n</function>"


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("form", "written", "text", "calls"),
    [
        (HERMES, f"Well. \n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", "Well.",
         [("f", {"a": 1}), ("g", {})]),
        (HERMES, f"<tool_call>{XML}</tool_call>", "", [("f", {"a": "1", "b": [2]})]),
        (HERMES, f"<tool_call>\n{F}", "", [("f", {"a": 1})]),
        (HERMES, "a < b <tool_call> {x} </tool_call> end ", "a < b<tool_call> {x} </tool_call> end ", []),
        (HERMES, " no call <tool", " no call <tool", []),
        (LLAMA, f" {G}; {F}", "", [("g", {}), ("f", {"a": 1})]),
        (LLAMA, '{"name": "x", "parameters": {}}', '{"name": "x", "parameters": {}}', []),
        (LLAMA, "{not JSON", "{not JSON", []),
        (LLAMA, f"See {F}", f"See {F}", []),
        (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [("f", {"a": 1}), ("g", {})]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", [("f", {"a": 1}), ("g", {})]),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (None, f"<tool_call>{F}</tool_call> ", f"<tool_call>{F}</tool_call> ", []),
    ],
)  # fmt: skip
def test_calls_are_found_in_each_form(
    form: ToolForm | None, written: str, text: str, calls: list[Any], step: int
) -> None:
    assert split(written, step, form=form) == ("", text, calls)


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("written", "begins", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nHi. ", False, ("Hm.", "Hi. ", [])),
        ("Hm.</think>Hi", True, ("Hm.", "Hi", [])),
        ("Hm", True, ("Hm", "", [])),
        ("No <think> here", False, ("", "No <think> here", [])),
        (f"<think>{F}</think><tool_call>{F}</tool_call>", False, (F, "", [("f", {"a": 1})])),
    ],
)
def test_reasoning_is_separated(written: str, begins: bool, expected: Any, step: int) -> None:
    format = {"form": HERMES, "has_thinking": True, "begins_thinking": begins}
    assert split(written, step, **format) == expected


def test_a_single_call_is_the_first_one() -> None:
    written = f"<tool_call>{G}</tool_call><tool_call>{F}</tool_call>"
    assert split(written, 3, form=HERMES, is_single=True) == ("", "", [("g", {})])


def test_the_form_is_the_one_of_the_template() -> None:
    assert form_of("{% for tool in tools %}<tool_call>{% endfor %}") is HERMES
    assert form_of('Respond in the format {"name": function name, "parameters": ...}') is LLAMA
    assert form_of("[TOOL_CALLS]") is MISTRAL
    assert form_of("{{ tools }}") is None
