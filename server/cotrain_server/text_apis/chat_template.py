"""Rendering of a chat with the model's own template into the text that the model continues.

A template is a Jinja program from a model's files, so it runs in Jinja's sandbox with limits on
size and time. Names and filters are those that `transformers` provides. The output therefore equals
that of `apply_chat_template` (a test compares them).
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.tools import OPEN_THINKING, form_of

#: A message in the form of templates: `role`, `content` as text, and where they apply
#: `reasoning_content`, `tool_calls` with parsed arguments, `tool_call_id` and `name`.
Message = dict[str, Any]

MAX_RENDERED_CHARACTERS = 32 * 1024**2
MAX_RENDER_S = 5.0
#: Errors of a Jinja program, whose author is the model's and whose input is a tenant's.
_TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip
#: Marker after the text to be continued while the template runs. It ends in a space to detect a
#: template that trims its messages.
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
#: Names of a template's context that other fields of a request set.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Thinking(NamedTuple):
    """Setting of a model's reasoning."""

    field: str  # Name of the request's field, for errors
    is_on: bool
    effort: str | None = None  # Level, for templates that have levels


class ChatTemplate:
    """Chat template of a model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        names = meta.find_undeclared_variables(environment.parse(source))
        self.options = names - environment.globals.keys() - special_tokens.keys() - _RESERVED
        """Names of the options that the template reads."""
        self.has_tools = "tools" in names
        self.tool_form = form_of(source)
        self.has_thinking = OPEN_THINKING in source

    def check_tools(self) -> None:
        """Raise Invalid if the model cannot be given tools."""
        if not self.has_tools:
            raise Invalid("tools: this model's chat template has no tools.")
        if self.tool_form is None:
            raise Invalid(
                "tools: the form in which this model's chat template writes tool calls is not supported here."
            )

    def thinking_options(self, thinking: Thinking) -> dict[str, Any]:
        """Return the options that set the reasoning. Raises Invalid if the template has none."""
        name = next((name for name in ("enable_thinking", "thinking") if name in self.options), None)
        if thinking.effort and "reasoning_effort" in self.options:
            return {"reasoning_effort": thinking.effort}
        if name is not None:
            return {name: thinking.is_on}
        if thinking.is_on and not self.has_thinking:
            raise Invalid(f"{thinking.field}: this model's chat template has no reasoning.")
        if self.has_thinking and not thinking.is_on:
            raise Invalid(f"{thinking.field}: the reasoning of this model's chat template cannot be turned off.")
        return {}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise Invalid for an option that has no effect. A value of None or False requests none."""
        for name, value in options.items():
            if name in self.options or value is None or (value is False and name not in _RESERVED):
                continue
            if name == "add_generation_prompt" and value is True:
                continue
            known = ", ".join(sorted(self.options)) or "none"
            raise Invalid(
                f"chat_template_kwargs.{name} is not supported here. Options of this model's chat template: {known}."
            )

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Return the template of a tokenizer folder, or None if the model is not a chat model. Raises
        TemplateSyntaxError: the file is not a valid template.
        """
        template = folder / "chat_template.jinja"
        if not template.is_file():
            return None
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return cls(template.read_text(encoding="utf-8"), _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final: bool = False,
    ) -> str:
        """Return a chat as text up to the model's continuation, in a new message or within the last one.

        `options` are the template's own (such as `enable_thinking`). `tools` are functions in OpenAI's format. Raises
        Invalid: the template refuses the messages, or its output exceeds the limits.
        """
        if continue_final:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _CONTINUE_HERE}]
        context = {
            **self._special_tokens,
            **(options or {}),
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": not continue_final,
        }
        try:
            rendered = self._run(context)
        except _TEMPLATE_FAULTS as error:
            reason = str(error) if isinstance(error, TemplateError) else "it failed"
            raise Invalid(f"messages: the model's chat template refuses them: {reason}") from error
        return _cut(rendered) if continue_final else rendered

    def _run(self, context: Mapping[str, Any]) -> str:
        parts, size, until = list[str](), 0, time.monotonic() + MAX_RENDER_S
        for part in self._template.generate(context):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED_CHARACTERS or time.monotonic() > until:
                raise Invalid("messages: the output of the model's chat template is too long.")
        return "".join(parts)


def _cut(rendered: str) -> str:
    """Return the text before the marker. Drop the space that the template trimmed before it."""
    before, found, after = rendered.rpartition(_CONTINUE_HERE.strip())
    if not found:
        raise Invalid("messages: this model's chat template cannot continue a last message.")
    return before if after.startswith(" ") else before.rstrip()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, … of a `tokenizer_config.json`. Some are stored as objects."""
    tokens = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """Block `{% generation %}`, which marks the model's text for training. Here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the server's local time, as in `transformers`
