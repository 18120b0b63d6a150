"""Tools of a chat: their definitions and the choice in a request, and the calls in an answer.

A model writes calls as its chat template shows them. Qwen and Hermes put JSON between `<tool_call>` tags, and
Qwen3-Coder XML. Llama 3 writes a JSON object in place of a text. Mistral writes `[TOOL_CALLS]` before its calls.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from cotrain_server.errors import Invalid

#: JSON schema of the arguments of each tool, by its name.
Tools = Mapping[str, Mapping[str, Any]]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may call. Without functions, it may call none."""

    functions: tuple[Mapping[str, Any], ...] = ()
    """Definitions in OpenAI's format, as templates read them."""
    choice: Literal["auto", "required"] = "auto"
    name: str | None = None  # The only function to call, if the choice is one
    is_single: bool = False  # True for at most one call in a message

    @property
    def schemas(self) -> Tools:
        """Schema of the arguments of each function that may be called."""
        functions = [each["function"] for each in self.functions]
        return {f["name"]: f["parameters"] for f in functions if self.name in (None, f["name"])}


def openai_tools(tools: Sequence[Any] | None, choice: Any, *, parallel: bool | None, is_flat: bool = False) -> ToolUse:
    """Return the tools of a chat completion. Raises Invalid with the name of the wrong field.

    With `is_flat`, name and parameters are fields of the tool itself, as in the Responses API.
    """
    functions = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        given = tool if is_flat else tool.get("function")
        if tool.get("type") != "function" or not isinstance(given, dict):
            raise Invalid(f"{where}: only tools of type 'function' are supported here.")
        where = where if is_flat else f"{where}.function"
        functions.append(_function(given, given.get("parameters"), f"{where}.parameters", where))
    if isinstance(choice, dict):
        named = choice if is_flat else choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        where = "tool_choice.name" if is_flat else "tool_choice.function.name"
        return _chosen(functions, "required", name or "", not parallel, where)
    if choice not in (None, "auto", "none", "required"):
        raise Invalid("tool_choice must be 'auto', 'none', 'required' or the name of a function.")
    return _chosen(functions, choice or "auto", None, parallel is False, "tool_choice")


def anthropic_tools(tools: Sequence[Any] | None, choice: Mapping[str, Any] | None) -> ToolUse:
    """Return the tools of a message request. Raises Invalid with the name of the wrong field."""
    functions = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if tool.get("type") not in (None, "custom"):
            raise Invalid(f"{where}.type: tools that the server runs are not supported here.")
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise Invalid(f"{where}.input_schema must be a JSON schema.")
        functions.append(_function(tool, schema, f"{where}.input_schema", where))
    choice = choice or {"type": "auto"}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
    kind = kinds.get(str(choice.get("type")))
    if kind is None:
        raise Invalid("tool_choice.type must be 'auto', 'none', 'any' or 'tool'.")
    name = choice.get("name", "") if choice["type"] == "tool" else None
    is_single = bool(choice.get("disable_parallel_tool_use"))
    return _chosen(functions, kind, name, is_single, "tool_choice.name")


def call_messages(calls: Sequence[tuple[Any, Any, Any]], where: str) -> list[dict[str, Any]]:
    """Return the calls of a history for a template, from their ids, names and arguments. Raises Invalid: the arguments
    are no JSON object, or the name is no text.
    """
    written = []
    for number, (id_, name, arguments) in enumerate(calls):
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise Invalid(f"{where}[{number}] must have a name, and a JSON object of arguments.")
        function = {"name": name, "arguments": arguments}
        written.append({"id": str(id_ or ""), "type": "function", "function": function})
    return written


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return two messages of one role as one."""
    texts = [text for text in (first["content"], second["content"]) if text]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    joined = {**first, **second, "content": "\n".join(texts)}
    return joined | ({"tool_calls": calls} if calls else {})


def _function(given: Mapping[str, Any], parameters: Any, where_parameters: str, where: str) -> dict[str, Any]:
    name, description = given.get("name"), given.get("description")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise Invalid(f"{where}.name must have 1 to 128 letters, digits or any of '_.:-'.")
    if not isinstance(parameters, dict | None):
        raise Invalid(f"{where_parameters} must be a JSON schema.")
    function = {
        "name": name,
        "description": description if isinstance(description, str) else "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _chosen(
    functions: Sequence[Mapping[str, Any]], choice: str, name: str | None, is_single: bool, where: str
) -> ToolUse:
    if len(functions) > MAX_TOOLS:
        raise Invalid(f"tools has {len(functions)} entries; the limit is {MAX_TOOLS}.")
    names = [each["function"]["name"] for each in functions]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise Invalid(f"tools: the name {twice!r} occurs more than once.")
    if choice == "none":
        return ToolUse()
    if name is not None and name not in names:
        raise Invalid(f"{where}: tools has no function of this name.")
    if choice == "required" and not functions:
        raise Invalid(f"{where}: tools is empty, so no call can be required.")
    is_required = choice == "required"
    return ToolUse(tuple(functions), "required" if is_required else "auto", name, is_single)


class Markers(NamedTuple):
    """Texts around a block of calls."""

    opening: str
    closing: str  # Empty if the block ends with the message


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

    @property
    def text(self) -> str:
        """Arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


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
