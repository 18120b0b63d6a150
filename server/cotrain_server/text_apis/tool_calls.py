"""Tool calls in the forms of chat models: found in the text of an answer, one block at a time.

A model writes calls as its chat template shows them. Qwen and Hermes put JSON between `<tool_call>` tags, and
Qwen3-Coder XML. Llama 3 writes a JSON object in place of a text. Mistral writes `[TOOL_CALLS]` before its calls.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

#: JSON schema of the arguments of each tool, by its name.
Tools = Mapping[str, Mapping[str, Any]]


class Markers(NamedTuple):
    """Texts around a block of calls."""

    opening: str
    closing: str  # Empty if the block goes on to the end of the message


class ToolForm(Enum):
    """Form of the calls of a model."""

    HERMES = Markers("<tool_call>", "</tool_call>")
    LLAMA = Markers("", "")
    MISTRAL = Markers("[TOOL_CALLS]", "")


#: Markers around a model's reasoning.
OPEN_THINKING, CLOSE_THINKING = "<think>", "</think>"
#: Names of control tokens that a message shows, because they separate its parts.
MARKER_TOKENS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", OPEN_THINKING, CLOSE_THINKING,
)  # fmt: skip

_XML_CALL = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_JSON = json.JSONDecoder()
_ID_CHARACTERS = string.ascii_letters + string.digits
#: Mistral's templates accept ids of exactly this length.
_ID_LENGTH = 9


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]
    index: int = 0  # Number of calls before it in its message


class _Unreadable(ValueError):
    """The text is no call."""


def form_of(template: str) -> ToolForm | None:
    """Return the form that a chat template shows to its model; None for no form known here."""
    if "[TOOL_CALLS]" in template:
        return ToolForm.MISTRAL
    if "<tool_call>" in template:
        return ToolForm.HERMES
    return ToolForm.LLAMA if re.search(r"python_tag|\"parameters\\?\":", template) else None


def read_calls(form: ToolForm, block: str, tools: Tools) -> list[Call]:
    """Return the calls of a block between the markers of a form; empty if it is not valid."""
    readers = {ToolForm.HERMES: _hermes, ToolForm.LLAMA: _llama, ToolForm.MISTRAL: _mistral}
    try:
        return list(readers[form](block.strip(), tools))
    except (ValueError, RecursionError):
        return []


def _hermes(block: str, tools: Tools) -> Iterator[Call]:
    if not block.startswith("<function="):
        yield _call(json.loads(block))
        return
    for name, inner in _XML_CALL.findall(block):
        properties = tools.get(name, {}).get("properties", {})
        yield _new(name, {key: _typed(text, properties, key) for key, text in _XML_ARGUMENT.findall(inner)})


def _llama(block: str, tools: Tools) -> Iterator[Call]:
    at = 0
    while at < len(block):
        value, at = _JSON.raw_decode(block, at)
        call = _call(value)
        if call.name not in tools:
            raise _Unreadable  # an answer in JSON
        yield call
        rest = block[at:].lstrip("; \n")
        at = len(block) - len(rest)


def _mistral(block: str, tools: Tools) -> Iterator[Call]:
    if block.startswith("["):
        value, _ = _JSON.raw_decode(block)
        yield from map(_call, value)
        return
    for part in block.split(ToolForm.MISTRAL.value.opening):
        name, brace, rest = part.partition("{")
        arguments, _ = _JSON.raw_decode(brace + rest)
        yield _new(name.removesuffix("[ARGS]").strip(), arguments)


def _typed(text: str, properties: Any, key: str) -> Any:
    """Return an argument of a call in XML: a text if the schema requires one, else JSON if valid."""
    schema = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise _Unreadable
    return _new(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _new(name: Any, arguments: Any) -> Call:
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise _Unreadable
    return Call("".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)), name, arguments)
