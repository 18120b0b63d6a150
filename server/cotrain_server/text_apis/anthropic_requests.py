"""Request and error models of Anthropic's API, and the refusal of unsupported fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from typing_extensions import override

from cotrain.wire.model import Listed
from cotrain_server.errors import Invalid
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.grammars import schema_of
from cotrain_server.text_apis.openai_requests import text_of, top_k_of, top_p_of
from cotrain_server.text_apis.prompts import Chat
from cotrain_server.text_apis.route import Fields, Refusal, TextRequest
from cotrain_server.text_apis.tools import anthropic_tools, call_messages, joined
from cotrain_store.bodies.sample_body import SampleBody

_FORMAT = "output_config.format"
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    415: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ChatMessage(Fields):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Listed[dict[str, Any]]


class OutputConfig(Fields):
    """Format of the answer."""

    format: dict[str, Any] | None = None


class CountRequest(TextRequest):
    """POST messages/count_tokens: count the tokens of a chat."""

    harmless = frozenset({
        "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
        "user_profile_id", "workspace_id",
    })  # fmt: skip

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    system: str | Listed[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None

    @override
    def check(self, where: str = "") -> None:
        """Raise Invalid for unsupported fields."""
        super().check(where)
        if self.output_config:
            self.output_config.check("output_config.")
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}].")

    def chat(self) -> Chat:
        """Return the chat. Raises Invalid for a wrong message, tool or choice."""
        return Chat(
            self.template_messages(),
            anthropic_tools(self.tools, self.tool_choice),
            thinking=_thinking(self.thinking),
            continues=self.messages[-1].role == "assistant",
            schema=schema_of(self.output_config.format, _FORMAT) if self.output_config else None,
        )

    def template_messages(self) -> list[Message]:
        """Return the messages for a chat template. Consecutive messages of one role are joined. Raises Invalid: a
        message has a block that is neither text nor a tool's.
        """
        chat: list[Message] = []
        if self.system:
            chat.append({"role": "system", "content": text_of(self.system, "system")})
        for number, message in enumerate(self.messages):
            for written in _converted(message, f"messages[{number}].content"):
                last = chat[-1] if chat else None
                if last and written["role"] == last["role"] != "tool":
                    chat[-1] = joined(last, written)
                else:
                    chat.append(written)
        return chat


class MessageRequest(CountRequest):
    """POST messages: write the next message of a chat, or the rest of its last one."""

    max_tokens: int
    stop_sequences: Listed[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the message early."""
        return tuple(self.stop_sequences or ())

    def body(self, prompt: list[int]) -> SampleBody:
        """Return the sample request."""
        return SampleBody(
            prompt=tuple(prompt),
            num_samples=1,
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=top_k_of(self.top_k),
            top_p=top_p_of(self.top_p),
            seed=None,
            stop=self.stop_strings or None,
            stream=bool(self.stream),
        )


def _converted(message: ChatMessage, where: str) -> list[Message]:
    """Return the results of tools in a message, and the rest of it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, reasoning = list[Message](), list[dict[str, Any]](), [], list[str]()
    for number, block in enumerate(message.content):
        kind, at = block.get("type"), f"{where}[{number}]"
        if kind == "tool_result" and message.role == "user":
            text = text_of(block.get("content"), f"{at}.content")
            id_ = str(block.get("tool_use_id") or "")
            results.append({"role": "tool", "content": text, "tool_call_id": id_})
        elif kind == "tool_use" and message.role == "assistant":
            calls += call_messages([(block.get("id"), block.get("name"), block.get("input"))], at)
        elif kind == "thinking" and message.role == "assistant":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":
            continue
        else:
            text_of([block], where, number)
            texts.append(block)
    if results and not texts:
        return results
    written: Message = {"role": message.role, "content": text_of(texts, where)}
    if reasoning := [text for text in reasoning if text]:
        written["reasoning_content"] = "\n".join(reasoning)
    return [*results, written | ({"tool_calls": calls} if calls else {})]


def _thinking(given: Mapping[str, Any] | None) -> Thinking | None:
    kind = given and given.get("type")
    if kind in (None, "adaptive"):
        return None
    if kind not in ("enabled", "disabled"):
        raise Invalid("thinking.type must be 'enabled', 'adaptive' or 'disabled'.")
    return Thinking("thinking", kind == "enabled")


class ErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Error format of Anthropic's API."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


def anthropic_error(refusal: Refusal, request_id: str) -> AnthropicError:
    """Return an error in Anthropic's format."""
    kind = _ERROR_TYPES.get(refusal.status, "api_error")
    # Clients recognize a full context by these words.
    message = ("prompt is too long: " if refusal.is_too_long else "") + refusal.message
    detail = ErrorDetail(type=kind, message=message)
    return AnthropicError(error=detail, request_id=request_id)
