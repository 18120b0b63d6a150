"""Conversations in OpenAI's format, from JSONL or from Python."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.errors import UnsupportedInput

ASSISTANT = "assistant"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, and the tools that the model may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    """Its position for messages, such as `train.jsonl:12`."""

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's messages, without those of `weight` 0."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == ASSISTANT and message.get("weight", 1) != 0
        ]


def read_chat(file: str | Path) -> list[Conversation]:
    """Read conversations, one JSON object in each line: `{"messages": [...], "tools": [...]}`.

    Raises UnsupportedInput, which names the line and the field, or OSError.
    """
    found = []
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            source = f"{Path(file).name}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UnsupportedInput(f"{source} is not JSON: {error}") from None
            found.append(conversation_of(row, source))
    return found


def conversation_of(row: Any, source: str = "the conversation") -> Conversation:
    """Return the conversation of a parsed line. Raises UnsupportedInput, which names the field.

    Content in parts becomes text. Arguments of tool calls become objects, because templates print them as JSON.
    """
    if isinstance(row, Conversation):
        return row
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list | tuple):
        keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise UnsupportedInput(f"{source} has no list `messages` of role and content (it has {keys})")
    messages = tuple(
        _message(message, f"{source}: messages[{number}]") for number, message in enumerate(row["messages"])
    )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UnsupportedInput(f"{source}: messages has no answer (role assistant) to train on")
    return Conversation(messages, tuple(row.get("tools") or ()), source)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedInput(f"{where} must be an object with a `role`")
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    if content is None and not calls:
        raise UnsupportedInput(f"{where}.content is missing")
    given = {**message, "content": _text(content, where)}
    return {**given, "tool_calls": calls} if calls else given


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UnsupportedInput(f"{where}.content must be text, not {kind}")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
