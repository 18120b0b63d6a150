"""Request and error models of Anthropic's API, and the refusal of unsupported fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cotrain.wire.model import Listed
from cotrain_server.text_apis.chat_template import Message
from cotrain_server.text_apis.openai_requests import refuse_unsupported, text_of
from cotrain_server.text_apis.route import Refusal
from cotrain_store.bodies.sample_body import SampleBody

HARMLESS = frozenset({
    "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "user_profile_id", "workspace_id",
})  # fmt: skip
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "output_config": ({},),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    415: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class _Fields(BaseModel):
    model_config = ConfigDict(
        extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class ChatMessage(_Fields):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Listed[dict[str, Any]]


class MessageRequest(_Fields):
    """POST messages: write the next message of a chat, or the rest of its last one."""

    model: Annotated[str, Field(min_length=1, max_length=2048)]
    """A base model, a `tinker://` path, or `<base model>;<path>`."""
    max_tokens: int
    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    system: str | Listed[dict[str, Any]] | None = None
    stop_sequences: Listed[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raise Invalid for unsupported fields."""
        refuse_unsupported(self.model_extra or {}, HARMLESS, NEUTRAL)
        for number, message in enumerate(self.messages):
            refuse_unsupported(message.model_extra or {}, (), {}, f"messages[{number}].")

    @property
    def is_prefilled(self) -> bool:
        """True if the last message is the model's own, to be continued."""
        return self.messages[-1].role == "assistant"

    def chat(self) -> list[Message]:
        """Return the messages for a chat template. Consecutive messages of one role are joined.

        Raises:
            Invalid: a message is not text.
        """
        chat: list[Message] = []
        if self.system:
            chat.append({"role": "system", "content": text_of(self.system, "system")})
        for number, message in enumerate(self.messages):
            text = text_of(message.content, f"messages[{number}].content")
            if chat and chat[-1]["role"] == message.role:
                chat[-1] = {"role": message.role, "content": f"{chat[-1]['content']}\n{text}"}
            else:
                chat.append({"role": message.role, "content": text})
        return chat

    def body(self, prompt: list[int]) -> SampleBody:
        """Return the sample request."""
        return SampleBody(
            prompt=tuple(prompt),
            num_samples=1,
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None,
            stop=tuple(self.stop_sequences or ()) or None,
            prompt_logprobs=False,
            topk_prompt_logprobs=0,
            topk_sample_logprobs=0,
            prompt_logprobs_last_n=None,
            target_prompt_logprobs=None,
            stream=bool(self.stream),
        )


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
    detail = ErrorDetail(type=kind, message=refusal.message)
    return AnthropicError(error=detail, request_id=request_id)
