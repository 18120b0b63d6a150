"""Grammars of answers: a JSON schema, or a required tool call. A worker holds the answer to them.

`check_grammar` compiles a grammar in a child process, so a hostile one costs a bounded time.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.message_parts import MessageFormat
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_server.text_apis.tools import ToolForm, ToolUse
from cotrain_store.bodies.sample_body import MAX_GRAMMAR_CHARACTERS, grammar_limits

#: White space between parts of JSON. Without a limit, a model may write it permanently.
_SPACE = {"whitespace_pattern": r"[ \n\r\t]{0,16}"}
#: Limit of processor time on the compilation of a grammar in seconds. A worker compiles it again between two
#: steps, in which all samples wait. A schema of 600 fields takes 0.015 s.
MAX_COMPILE_S = 0.1
_REASONING = r"reasoning[lazy]: /(.|\n)*<\/think>[ \n]{0,2}/"


def schema_of(given: Mapping[str, Any] | None, where: str) -> Any:
    """Return the JSON schema of a `response_format`, or None for a text. Raises Invalid: the type or the schema is wrong."""
    kind = (given or {"type": "text"}).get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    wrapped = given.get("json_schema", given)
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if kind != "json_schema":
        raise Invalid(f"{where}.type must be 'text', 'json_object' or 'json_schema'.")
    if not isinstance(schema, dict):
        raise Invalid(f"{where}: the schema must be a JSON object.")
    return schema


def answer_grammar(schema: Any, tools: ToolUse, format: MessageFormat, tokenizer: Tokenizer) -> str | None:
    """Return the grammar of an answer with a schema or a required call, or None for any text."""
    if tools.choice == "required":
        assert format.form is not None
        start = _call_grammar(tools, format.form, tokenizer)
    elif schema is not None:
        start = [_json(schema)]
    else:
        return None
    if not format.begins_thinking:
        return "start: " + " ".join(start)
    return f"start: reasoning {' '.join(start)}\n{_REASONING}"


def _call_grammar(tools: ToolUse, form: ToolForm, tokenizer: Tokenizer) -> list[str]:
    field = "parameters" if form is ToolForm.LLAMA else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, field: schema},
            "required": ["name", field],
            "additionalProperties": False,
        }
        for name, schema in tools.schemas.items()
    ]
    call: Any = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form is ToolForm.MISTRAL:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": 1}
    opening, closing = (_marker(each, tokenizer) for each in form.value)
    return [each for each in (opening, _json(call), closing) if each]


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """Return a marker in a grammar: a control token by its id, else its text."""
    tokens = tokenizer.control_tokens([text])
    return f"<[{min(tokens)}]>" if tokens else json.dumps(text) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACE})


def check_grammar(grammar: str, where: str, max_s: float = MAX_COMPILE_S) -> None:
    """Compile a grammar. Raises Invalid if it is invalid or too complex."""
    from llguidance import LLMatcher

    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise Invalid(f"{where}: the schema has {len(grammar)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}.")
    started_at = time.process_time()
    text = LLMatcher.grammar_from_lark(grammar)
    reason = LLMatcher.validate_grammar(text, limits=grammar_limits())
    if reason and not reason.startswith("WARNING"):
        raise Invalid(f"{where}: the schema cannot be used: {reason.splitlines()[0][:300]}")
    if time.process_time() - started_at > max_s:
        raise Invalid(f"{where}: the schema is too complex. Make it smaller, or simplify patterns.")
