"""Grammars of answers: of a schema or a required call, refused by name if they cost too much."""

from typing import Any

import pytest
import tokenizers

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.grammars import answer_grammar, check_grammar, schema_of
from cotrain_server.text_apis.message_parts import MessageFormat
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_server.text_apis.tools import ToolForm, ToolUse, openai_tools
from tests.support.tiny_tokenizers import trained_tokenizer

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(trained_tokenizer(512)))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
NO_TOOLS = ToolUse()


def grammar(schema: Any = None, tools: ToolUse = NO_TOOLS, **format: Any) -> str:
    found = answer_grammar(schema, tools, MessageFormat(**format), TOKENIZER)
    assert found is not None
    return found


@pytest.mark.parametrize("form", ToolForm)
@pytest.mark.parametrize("begins", [False, True])
def test_the_grammar_of_each_form_is_valid(form: ToolForm, begins: bool) -> None:
    required = openai_tools(TOOLS, "required", parallel=None)
    written = grammar(tools=required, form=form, begins_thinking=begins, has_thinking=begins)
    check_grammar(written, "tools")
    assert form.value.opening in written
    assert '"g"' in written
    named = openai_tools(TOOLS, {"function": {"name": "f"}}, parallel=None)
    assert '"g"' not in grammar(tools=named, form=form)


def test_the_formats_of_an_answer() -> None:
    check_grammar(grammar(schema_of({"type": "json_object"}, "response_format")), "response_format")
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert schema_of(wrapped, "f") == schema_of({"type": "json_schema", "schema": SCHEMA}, "f")
    assert schema_of(None, "f") is schema_of({"type": "text"}, "f") is None
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": 1}):
        with pytest.raises(Invalid, match="f"):
            schema_of(wrong, "f")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"not": {}},
        {"$ref": "http://host.invalid/schema"},
        {"enum": [f"x{at}" for at in range(20_000)]},
        {"type": "string", "pattern": "("},
        {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(12)]},
    ],
)
def test_a_hostile_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="response_format: the schema"):
        check_grammar(grammar(schema), "response_format")
