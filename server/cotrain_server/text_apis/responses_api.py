"""OpenAI's Responses API: its request, and the objects and events of its answer.

The items of a request become the messages of a chat.
"""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from cotrain.wire.model import Listed
from cotrain.wire.sampling import SampleResponse
from cotrain_server.errors import Invalid
from cotrain_server.text_apis import openai_requests as openai
from cotrain_server.text_apis.answers import Reply, SequenceText, event
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.generation import Ended, NewTokens, policy_fields
from cotrain_server.text_apis.grammars import schema_of
from cotrain_server.text_apis.message_parts import Reasoning, Segment
from cotrain_server.text_apis.openai_responses import STILL_HERE, scored, token_entries, usage
from cotrain_server.text_apis.prompts import Chat
from cotrain_server.text_apis.route import Fields, Refusal
from cotrain_server.text_apis.tools import Call, call_messages, joined, openai_tools
from cotrain_store.bodies.sample_body import SampleBody

LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"
#: Nothing is stored, so a request cannot refer to an earlier one.
_STORED = ("previous_response_id", "conversation")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text")


class TextConfig(Fields):
    """Format of the answer's text."""

    neutral: ClassVar[Mapping[str, Collection[object]]] = {"verbosity": ("medium",)}

    format: dict[str, Any] | None = None


class ReasoningConfig(Fields):
    """Setting of the model's reasoning."""

    harmless = frozenset({"summary", "generate_summary"})

    effort: openai.Effort | None = None


class ResponseRequest(openai.GenerationRequest):
    """POST responses: write the next message of a chat that is a list of items."""

    harmless = openai.HARMLESS | {"max_tool_calls"}
    neutral: ClassVar[Mapping[str, Collection[object]]] = {
        **openai.NEUTRAL, "background": (False,), "context_management": ([],), "truncation": ("disabled",),
    }  # fmt: skip

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

    @override
    def check(self, where: str = "") -> None:
        """Raise Invalid for unsupported fields."""
        for name in _STORED:
            if (self.model_extra or {}).get(name) is not None:
                raise Invalid(
                    f"{name} is not supported here, because no response is stored. Send the whole history in input."
                )
        super().check(where)
        if self.max_tokens is not None:
            raise Invalid("max_tokens is not supported here; send max_output_tokens.")
        if self.n not in (None, 1):
            raise Invalid("n must be 1: a response has one message.")
        for name in self.include or ():
            if name not in (LOGPROBS, _REASONING):
                raise Invalid(f"include: {name!r} is not supported here.")
        if self.text:
            self.text.check("text.")
        if self.reasoning:
            self.reasoning.check("reasoning.")

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


class ResponseAnswer:
    """Response to one request (`answers.Format`): output items, and the numbered events that build them."""

    idle = STILL_HERE

    def __init__(self, wanted: ResponseRequest, reply: Reply) -> None:
        self._wanted, self._reply = wanted, reply
        self._text = SequenceText(reply)
        self._sent = 0
        """Number of events so far."""
        self._finished: list[dict[str, Any]] = []
        """Complete items."""
        self._open: dict[str, Any] | None = None
        """Item of the last text, which further text of its type extends."""
        self._logprobs: list[dict[str, Any]] = []
        """Log-probs that belong to the next text."""

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """Return the complete response."""
        (sequence,) = responses[0].sequences
        new = NewTokens(0, 0, sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs or [])
        for _ in (*self.push(new), *self._finish()):
            pass  # the items stay
        return self._complete(responses[0])

    def begin(self) -> Iterable[str]:
        """Return the start of an empty response."""
        begun = self._object("in_progress", [])
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def push(self, new: NewTokens) -> Iterator[str]:
        """Return the events of new tokens."""
        segments = self._text.push(new.tokens)
        if self._wanted.wants_logprobs:
            own, parts = scored(new.tokens, new.logprobs, new.likeliest), self._text.tokens.of_answer(new.tokens)
            self._logprobs += token_entries(self._reply.tokenizer, own, parts)
        return self._write_all(segments)

    def end(self, ended: Ended) -> Iterator[str]:
        """Return the events of the withheld text, and the complete response."""
        yield from self._finish()
        complete = self._complete(ended.response)
        yield self._event(f"response.{complete['status']}", response=complete)

    def failure(self, refusal: Refusal) -> str:
        """Return the failed response as an event."""
        code = "server_error" if refusal.status >= 500 else openai.openai_error(refusal).error.code
        failed = self._object("failed", self._finished, error={"code": code, "message": refusal.message})
        return self._event("response.failed", response=failed)

    def _event(self, name: str, /, **fields: Any) -> str:
        sent = event({"type": name, "sequence_number": self._sent, **fields}, name)
        self._sent += 1
        return sent

    def _item_event(self, name: str, /, **fields: Any) -> str:
        """Return an event about the open item."""
        assert self._open is not None
        return self._event(name, item_id=self._open["id"], output_index=len(self._finished), **fields)

    def _write_all(self, segments: Sequence[Segment]) -> Iterator[str]:
        for segment in segments:
            if isinstance(segment, Call):
                yield from self._call(segment)
            else:
                yield from self._write("reasoning" if isinstance(segment, Reasoning) else "message", segment.text)

    def _finish(self) -> Iterator[str]:
        """Write the withheld text. A response has at least one item."""
        yield from self._write_all(self._text.finish())
        if self._logprobs or not (self._open or self._finished):
            yield from self._write("message", "")
        yield from self._close()

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[str]:
        yield from self._close()
        id_ = f"{prefix}_{secrets.token_hex(12)}"
        self._open = {"id": id_, "type": kind, "status": "in_progress", **fields}
        yield self._event("response.output_item.added", output_index=len(self._finished), item=self._open)

    def _write(self, kind: str, text: str) -> Iterator[str]:
        prefix, part_kind = _TEXTS[kind]
        is_message = kind == "message"
        if self._open is None or self._open["type"] != kind:
            more: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
            yield from self._begin(kind, prefix, content=[], **more)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            part |= {"annotations": [], "logprobs": []} if is_message else {}
            yield self._item_event("response.content_part.added", content_index=0, part=part)
            assert self._open is not None
            self._open["content"].append(part)
        (part,) = self._open["content"]
        part["text"] += text
        more = {}
        if is_message:
            more = {"logprobs": self._logprobs}
            part["logprobs"] += self._logprobs
            self._logprobs = []
        if text:
            yield self._item_event(f"response.{part_kind}.delta", content_index=0, delta=text, **more)

    def _call(self, call: Call) -> Iterator[str]:
        yield from self._begin("function_call", "fc", call_id=call.id, name=call.name, arguments="")
        assert self._open is not None
        self._open["arguments"] = text = call.text
        name = "response.function_call_arguments"
        yield self._item_event(f"{name}.delta", delta=text)
        yield self._item_event(f"{name}.done", name=call.name, arguments=text)
        yield from self._close()

    def _close(self) -> Iterator[str]:
        if (item := self._open) is None:
            return
        for part in item.get("content", ()):
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._finished), item=item)
        self._finished.append(item)
        self._open = None

    def _complete(self, response: SampleResponse) -> dict[str, Any]:
        """Return the complete response with its usage."""
        (sequence,) = response.sequences
        used = usage(self._reply, [response])
        texts = [item["content"][0]["text"] for item in self._finished if item["type"] == "reasoning"]
        reasoning = len(self._reply.tokenizer.encode("".join(texts), special=False))
        counts = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": used["total_tokens"],
        }
        rest = {"usage": counts, **policy_fields(sequence)}
        if sequence.stop_reason != "length":
            return self._object("completed", self._finished, **rest)
        self._finished[-1]["status"] = "incomplete"
        details = {"reason": "max_output_tokens"}
        return self._object("incomplete", self._finished, incomplete_details=details, **rest)

    def _object(self, status: str, output: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        """Return a response with the settings of its request."""
        wanted, reply = self._wanted, self._reply
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
