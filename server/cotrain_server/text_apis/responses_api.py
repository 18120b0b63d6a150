"""OpenAI's Responses API: its request, and the objects and events of its answer.

The items of a request become the messages of a chat. The answer is made from the parts of a chat completion.
"""

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from cotrain.wire.model import Listed
from cotrain.wire.sampling import SampleResponse
from cotrain_server.errors import Invalid
from cotrain_server.text_apis import openai_requests as openai
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.generation import Event, policy_fields
from cotrain_server.text_apis.grammars import schema_of
from cotrain_server.text_apis.openai_responses import STILL_HERE, Choice, Reply, parts, usage
from cotrain_server.text_apis.prompts import Chat
from cotrain_server.text_apis.route import REFUSED, event, refusal_of
from cotrain_server.text_apis.tools import call_messages, joined, openai_tools
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


#: Id prefix of an item, and type of its content part, by type of item.
_TEXTS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}


class _Events:
    """Server-sent events with increasing numbers."""

    def __init__(self) -> None:
        self._sent = 0

    def __call__(self, name: str, /, **fields: Any) -> str:
        """Return the next event."""
        sent = event({"type": name, "sequence_number": self._sent, **fields}, name)
        self._sent += 1
        return sent


class _Items:
    """Output items of a response, and the events that build them."""

    def __init__(self, events: _Events) -> None:
        self.finished: list[dict[str, Any]] = []
        """Complete items."""
        self._events = events
        self._open: dict[str, Any] | None = None
        """Item of the last text, which further text of its type extends."""
        self._logprobs: list[dict[str, Any]] = []
        """Log-probs that belong to the next text."""

    @property
    def reasoning(self) -> str:
        """Text of all reasoning."""
        found = [item for item in self.finished if item["type"] == "reasoning"]
        return "".join(part["text"] for item in found for part in item["content"])

    def push(self, message: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[str]:
        """Yield the events of a message of a chat completion, or of its next part."""
        self._logprobs += (logprobs or {}).get("content", ())
        if text := message.get("reasoning_content"):
            yield from self._write("reasoning", text)
        if text := message.get("content"):
            yield from self._write("message", text)
        for call in message.get("tool_calls", ()):
            yield from self._call(call)

    def finish(self) -> Iterator[str]:
        """Yield the events of the end. A response has at least one item."""
        if self._logprobs or not (self._open or self.finished):
            yield from self._write("message", "")
        yield from self._close()

    @property
    def _position(self) -> dict[str, Any]:
        """Position of the open item in the fields of an event."""
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.finished)}

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[str]:
        yield from self._close()
        id_ = f"{prefix}_{secrets.token_hex(12)}"
        self._open = {"id": id_, "type": kind, "status": "in_progress", **fields}
        index = len(self.finished)
        yield self._events("response.output_item.added", output_index=index, item=self._open)

    def _write(self, kind: str, text: str) -> Iterator[str]:
        prefix, part_kind = _TEXTS[kind]
        if self._open is None or self._open["type"] != kind:
            is_message = kind == "message"
            more: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
            yield from self._begin(kind, prefix, content=[], **more)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            part |= {"annotations": [], "logprobs": []} if is_message else {}
            yield self._events("response.content_part.added", **self._position, content_index=0, part=part)
            assert self._open is not None
            self._open["content"].append(part)
        (part,) = self._open["content"]
        part["text"] += text
        more = {}
        if kind == "message":
            more = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        if text:
            name = f"response.{part_kind}.delta"
            yield self._events(name, **self._position, content_index=0, delta=text, **more)

    def _call(self, call: Mapping[str, Any]) -> Iterator[str]:
        function = call["function"]
        names = {"call_id": call["id"], "name": function["name"]}
        yield from self._begin("function_call", "fc", **names, arguments="")
        assert self._open is not None
        self._open["arguments"] = text = function["arguments"]
        name = "response.function_call_arguments"
        yield self._events(f"{name}.delta", **self._position, delta=text)
        yield self._events(f"{name}.done", **self._position, name=function["name"], arguments=text)
        yield from self._close()

    def _close(self) -> Iterator[str]:
        if (item := self._open) is None:
            return
        for part in item.get("content", ()):
            position = {**self._position, "content_index": 0}
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            name = f"response.{part['type']}.done"
            yield self._events(name, **position, text=part["text"], **more)
            yield self._events("response.content_part.done", **position, part=part)
        item["status"] = "completed"
        index = len(self.finished)
        yield self._events("response.output_item.done", output_index=index, item=item)
        self.finished.append(item)
        self._open = None


def answer(wanted: ResponseRequest, reply: Reply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Return the complete response."""
    choice = Choice(reply, 0, 0).whole(responses[0], responses[0].sequences[0])
    items = _Items(_Events())
    for _ in (*items.push(choice["message"], choice["logprobs"]), *items.finish()):
        pass
    return _ended(wanted, reply, items, choice["finish_reason"], responses)


async def stream(wanted: ResponseRequest, reply: Reply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Yield the response as server-sent events. The last event is the complete response."""
    numbered = _Events()
    begun, items = _object(wanted, reply, "in_progress", []), _Items(numbered)
    for name in ("created", "in_progress"):
        yield numbered(f"response.{name}", response=begun)
    responses: list[SampleResponse] = []
    reason = ""
    try:
        async for part in parts(reply, events, responses):
            if part is None:
                yield STILL_HERE
                continue
            for sent in items.push(part["delta"], part["logprobs"]):
                yield sent
            reason = part["finish_reason"] or reason
    except REFUSED as error:
        refusal = refusal_of(error)
        code = "server_error" if refusal.status >= 500 else openai.openai_error(refusal).error.code
        failure = {"code": code, "message": refusal.message}
        failed = _object(wanted, reply, "failed", items.finished, error=failure)
        yield numbered("response.failed", response=failed)
        return
    for sent in items.finish():
        yield sent
    ended = _ended(wanted, reply, items, reason, responses)
    yield numbered(f"response.{ended['status']}", response=ended)


def _ended(
    wanted: ResponseRequest, reply: Reply, items: _Items, reason: str, responses: Sequence[SampleResponse]
) -> dict[str, Any]:
    """Return the complete response with its usage."""
    used = usage(reply, responses)
    reasoning = len(reply.tokenizer.encode(items.reasoning, special=False))
    counts = {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": used["total_tokens"],
    }
    rest = {"usage": counts, **policy_fields(responses[0].sequences[0])}
    if reason != "length":
        return _object(wanted, reply, "completed", items.finished, **rest)
    items.finished[-1]["status"] = "incomplete"
    details = {"reason": "max_output_tokens"}
    return _object(wanted, reply, "incomplete", items.finished, incomplete_details=details, **rest)


def _object(
    wanted: ResponseRequest, reply: Reply, status: str, output: list[dict[str, Any]], **rest: Any
) -> dict[str, Any]:
    """Return a response with the settings of its request."""
    effort = wanted.reasoning.effort if wanted.reasoning else None
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
        "output": output,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "text": {"format": (wanted.text and wanted.text.format) or {"type": "text"}},
        "tool_choice": wanted.tool_choice or "auto",
        "tools": wanted.tools or [],
        "top_logprobs": wanted.top_logprobs or 0,
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        "truncation": "disabled",
        "usage": None,
        **rest,
    }
