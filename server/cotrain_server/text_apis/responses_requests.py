"""Request model of OpenAI's Responses API, whose items become the messages of a chat."""

from typing import Annotated, Any

from pydantic import Field

from cotrain.wire.model import Listed
from cotrain_server.errors import Invalid
from cotrain_server.text_apis import openai_requests as openai
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.grammars import schema_of
from cotrain_server.text_apis.prompts import Chat
from cotrain_server.text_apis.tool_requests import call_messages, joined, openai_tools
from cotrain_store.bodies.sample_body import SampleBody

LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"
_HARMLESS = openai.HARMLESS | {"max_tool_calls"}
_NEUTRAL = openai.NEUTRAL | {"background": (False,), "context_management": ([],), "truncation": ("disabled",)}
#: Nothing is stored, so a request cannot refer to an earlier one.
_STORED = ("previous_response_id", "conversation")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text")


class TextConfig(openai.Fields):
    """Format of the answer's text."""

    format: dict[str, Any] | None = None


class ReasoningConfig(openai.Fields):
    """Setting of the model's reasoning."""

    effort: openai.Effort | None = None


class ResponseRequest(openai.GenerationRequest):
    """POST responses: write the next message of a chat that is a list of items."""

    input: str | Annotated[Listed[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Listed[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=openai.MAX_LIKELIEST)] | None = None
    metadata: dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the text comes with its log-probs."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def body(self, prompt: list[int]) -> SampleBody:
        """Return the sample request."""
        return self.sample(prompt, self.max_output_tokens, self.top_logprobs or 0, score_prompt=False)

    def check(self) -> None:
        """Raise Invalid for unsupported fields."""
        given = self.model_extra or {}
        for name in _STORED:
            if given.get(name) is not None:
                raise Invalid(
                    f"{name} is not supported here, because no response is stored. Send the whole history in input."
                )
        openai.refuse_unsupported(given, _HARMLESS, _NEUTRAL)
        if self.max_tokens is not None:
            raise Invalid("max_tokens is not supported here; send max_output_tokens.")
        if self.n not in (None, 1):
            raise Invalid("n must be 1: a response has one message.")
        for name in self.include or ():
            if name not in (LOGPROBS, _REASONING):
                raise Invalid(f"include: {name!r} is not supported here.")
        if self.text:
            neutral = {"verbosity": ("medium",)}
            openai.refuse_unsupported(self.text.model_extra or {}, (), neutral, "text.")
        if self.reasoning:
            harmless = {"summary", "generate_summary"}
            openai.refuse_unsupported(self.reasoning.model_extra or {}, harmless, {}, "reasoning.")

    def chat(self) -> Chat:
        """Return the chat. Raises Invalid for a wrong item, tool or choice."""
        effort = self.reasoning.effort if self.reasoning else None
        return Chat(
            self.template_messages(),
            openai_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls, is_flat=True),
            thinking=effort and Thinking("reasoning.effort", effort != "none", effort),
            schema=schema_of(self.text.format, "text.format") if self.text else None,
        )

    def template_messages(self) -> list[Message]:
        """Return the messages for a chat template. Consecutive items of the model are joined. Raises Invalid: an item
        is neither text nor a tool's.
        """
        chat: list[Message] = []
        if self.instructions:
            chat.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*chat, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            written = _message(item, f"input[{number}]")
            if chat and written["role"] == chat[-1]["role"] == "assistant":
                chat[-1] = joined(chat[-1], written)
            else:
                chat.append(written)
        return chat


def _message(item: dict[str, Any], where: str) -> Message:
    kind = item.get("type") or "message"
    if kind == "function_call":
        call = item.get("call_id"), item.get("name"), item.get("arguments")
        return {"role": "assistant", "content": "", "tool_calls": call_messages([call], where)}
    if kind == "function_call_output":
        text = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}
    if kind == "reasoning":
        given = item.get("content") or item.get("summary")
        text = _text(given, f"{where}.content")
        return {"role": "assistant", "content": "", "reasoning_content": text}
    if kind != "message":
        raise Invalid(f"{where}.type: {kind!r} is not supported here.")
    role = openai.ROLES.get(str(item.get("role")))
    if role in (None, "tool"):
        raise Invalid(f"{where}.role: {item.get('role')!r} is not supported here.")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    """Return the text of an item. Its parts have other names than those of chat completions."""
    if isinstance(content, str | None):
        return content or ""
    if not isinstance(content, list):
        raise Invalid(f"{where} must be a text or a list of parts.")
    parts = [part if isinstance(part, dict) else {} for part in content]
    return openai.text_of(
        [part | {"type": "text"} if part.get("type") in _TEXT_PARTS else part for part in parts], where
    )
