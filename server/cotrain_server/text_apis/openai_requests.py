"""Request and error models of OpenAI's API, and the refusal of unsupported fields."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictInt
from typing_extensions import override

from cotrain.wire.model import Listed
from cotrain_server.errors import Invalid
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.grammars import schema_of
from cotrain_server.text_apis.prompts import Chat
from cotrain_server.text_apis.route import Fields, Refusal, TextRequest
from cotrain_server.text_apis.tools import call_messages, openai_tools
from cotrain_store.bodies.sample_body import SampleBody

#: `top_p` in place of 0, by which clients request the most likely token alone.
SMALLEST_TOP_P = 1e-9
#: Seed by which clients request another answer each time.
RANDOM_SEED = -1
MAX_CHOICES = 128
MAX_LIKELIEST = 20
MAX_PROMPTS = 256
#: Default length of a completion. A chat has no default limit.
COMPLETION_TOKENS = 16

HARMLESS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
NEUTRAL: Mapping[str, Collection[object]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

#: Codes of OpenAI's API in place of our own.
_CODES = {"invalid_key": "invalid_api_key", "expired_key": "invalid_api_key"}
#: Field that a message of `Invalid` names first.
_FIELD = re.compile(r"[a-z][a-z_]*(?:\[\d+\]|\.[A-Za-z_]+)*(?=:| must | has | is | needs )")
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def text_of(content: str | list[dict[str, Any]] | None, where: str, first: int = 0) -> str:
    """Join the text parts of a message by newlines. `first` is the index of the first part. Raises Invalid: a part is not text."""
    if isinstance(content, str) or content is None:
        return content or ""
    for number, part in enumerate(content, first):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise Invalid(f"{where}[{number}]: parts of type {kind!r} are not supported here; send text.")
    return "\n".join(part["text"] for part in content)


def top_k_of(given: int | None) -> int:
    """Return `top_k` of a sample request: -1 for no limit, which clients also write as 0."""
    return given or -1


def top_p_of(given: float | None) -> float:
    """Return `top_p` of a sample request. Clients write 0 for the most likely token alone."""
    return 1.0 if given is None else given or SMALLEST_TOP_P


Tokens = Listed[StrictInt]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None


class GenerationRequest(TextRequest):
    """Common fields of completions and chat completions. `null` is the default everywhere."""

    harmless = HARMLESS
    neutral = NEUTRAL

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # extension of OpenAI's API: sample only from the k most likely tokens
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Listed[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a sequence early."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """True if a stream must end with its token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sample(self, prompt: list[int], max_tokens: int | None, likeliest: int, *, score_prompt: bool) -> SampleBody:
        """Return the sample request. `score_prompt` requests the prompt's own log-probs."""
        return SampleBody(
            prompt=tuple(prompt),
            num_samples=self.n or 1,
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=top_k_of(self.top_k),
            top_p=top_p_of(self.top_p),
            seed=None if self.seed == RANDOM_SEED else self.seed,
            stop=self.stop_strings or None,
            prompt_logprobs=score_prompt,
            topk_prompt_logprobs=likeliest if score_prompt else 0,
            topk_sample_logprobs=likeliest,
            # The most likely tokens of each position arrive only with the result.
            stream=bool(self.stream) and not likeliest,
        )


class CompletionRequest(GenerationRequest):
    """POST completions: continue a text."""

    prompt: str | Tokens | Listed[str | Tokens]
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LIKELIEST)] | None,
        BeforeValidator(lambda given: None if given is False else given),
    ] = None
    """Number of alternatives to return per token; 0 for the log-probs alone."""
    add_special_tokens: bool | None = None
    """Extension of OpenAI's API: False if the text already has the control tokens of its start."""
    echo: bool | None = None  # True if the answer begins with the prompt

    @property
    def prompts(self) -> list[str | Tokens]:
        """Prompts, each as text or as tokens. Raises Invalid for none, or too many."""
        given = self.prompt
        # A list contains either only numbers or none, so its first entry decides.
        is_one = isinstance(given, str) or (given and isinstance(given[0], int))
        prompts: list[Any] = [given] if is_one else list(given)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise Invalid(f"prompt must have 1 to {MAX_PROMPTS} entries, not {len(prompts)}.")
        return prompts

    def body(self, prompt: list[int]) -> SampleBody:
        """Return the sample request of one prompt."""
        tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        is_scored = bool(self.echo) and self.logprobs is not None
        return self.sample(prompt, tokens, self.logprobs or 0, score_prompt=is_scored)

    @override
    def check(self, where: str = "") -> None:
        """Raise Invalid for unsupported fields."""
        super().check(where)
        if self.echo and self.stream and self.logprobs is not None:
            raise Invalid("echo: the log-probs of a prompt cannot be streamed.")


class ChatMessage(Fields):
    """A message of a chat."""

    # Clients send back the answers they received.
    harmless = frozenset({"annotations"})
    neutral: ClassVar[Mapping[str, Collection[object]]] = {"refusal": ("",)}

    role: str
    content: str | Listed[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST chat/completions: write the next message of a chat."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None  # newer name of `max_tokens`
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELIEST)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension of OpenAI's API: options of the model's chat template, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    response_format: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def body(self, prompt: list[int]) -> SampleBody:
        """Return the sample request."""
        limits = (self.max_completion_tokens, self.max_tokens)
        max_tokens = next((limit for limit in limits if limit is not None), None)
        return self.sample(prompt, max_tokens, self.top_logprobs or 0, score_prompt=False)

    @override
    def check(self, where: str = "") -> None:
        """Raise Invalid for unsupported fields."""
        super().check(where)
        if self.top_logprobs is not None and not self.logprobs:
            raise Invalid("top_logprobs needs logprobs.")

    def chat(self) -> Chat:
        """Return the chat. Raises Invalid for a wrong message, tool or choice."""
        effort = self.reasoning_effort
        return Chat(
            self.template_messages(),
            openai_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls),
            self.chat_template_kwargs or {},
            effort and Thinking("reasoning_effort", effort != "none", effort),
            schema=schema_of(self.response_format, "response_format"),
        )

    def template_messages(self) -> list[Message]:
        """Return the messages for a chat template. Raises Invalid if one is not text."""
        return [_message(message, f"messages[{number}]") for number, message in enumerate(self.messages)]


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None = None
    code: str


class OpenAIError(BaseModel):
    """Error format of OpenAI's API."""

    error: ErrorDetail


def openai_error(refusal: Refusal, request_id: str = "") -> OpenAIError:
    """Return an error in OpenAI's format, which has no id of the request."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    code, named = refusal.code, _FIELD.match(refusal.message)
    param = named[0] if named and code == "invalid" else None
    if refusal.is_too_long:
        code = "context_length_exceeded"
    elif refusal.names_no_model:
        code, param = "model_not_found", "model"
    return OpenAIError(
        error=ErrorDetail(
            message=refusal.message,
            type=_ERROR_TYPES.get(refusal.status, kind),
            param=param,
            code=_CODES.get(code, code),
        )
    )


def _message(message: ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise Invalid(f"{where}.role: {message.role!r} is not supported here.")
    message.check(f"{where}.")
    text = text_of(message.content, f"{where}.content")
    written: Message = {"role": ROLES[message.role], "content": text}
    if message.reasoning_content:
        written["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        calls = []
        for each in message.tool_calls:
            function = each.get("function")
            given = function if isinstance(function, dict) else {}
            calls.append((each.get("id"), given.get("name"), given.get("arguments")))
        written["tool_calls"] = call_messages(calls, f"{where}.tool_calls")
    if message.role == "tool":
        named = {"tool_call_id": message.tool_call_id, "name": message.name}
        written |= {key: text for key, text in named.items() if text}
    return written
