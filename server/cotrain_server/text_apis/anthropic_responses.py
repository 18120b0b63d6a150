"""Conversion of samples to Anthropic's response format, complete or streamed."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain.wire.sampling import SampledSequence, SampleResponse
from cotrain_server.text_apis.anthropic_requests import anthropic_error
from cotrain_server.text_apis.generation import Ended, Event, Idle, NewTokens, policy_fields
from cotrain_server.text_apis.message_parts import MessageFormat, MessageParts, Reasoning, Segment, Text, shown_tokens
from cotrain_server.text_apis.prompts import Target
from cotrain_server.text_apis.route import REFUSED, event, refusal_of
from cotrain_server.text_apis.token_texts import VisibleText
from cotrain_server.text_apis.tools import Call
from cotrain_store.bodies.sample_body import SampleBody

#: Field with the text of a block, by the type of its segments.
_FIELDS: dict[type[Segment], str] = {Text: "text", Reasoning: "thinking"}


@dataclass(frozen=True)
class MessageReply:
    """Data needed to answer one request."""

    id: str
    request_id: str
    model: str
    target: Target
    body: SampleBody
    stop: tuple[str, ...]
    begins: bool  # True if the text begins the message; False if it continues the prompt's
    format: MessageFormat

    def visible(self) -> VisibleText:
        """Return the empty text of the message."""
        return VisibleText(
            self.target.language.tokenizer,
            self.stop,
            self.target.pool.eos_token_ids,
            before=self.body.prompt,
            begins=self.begins,
            shown=shown_tokens(self.target.language.tokenizer, self.format),
        )

    def message(self, content: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        """Return the message object with its content."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **rest,
        }


def answer(reply: MessageReply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Return the complete message of the only response. Its only block may be an empty text."""
    (response,) = responses
    visible, (sequence,) = reply.visible(), response.sequences
    parts = MessageParts(reply.format)
    segments = parts.push(visible.push(sequence.tokens) + visible.finish()) + parts.finish()
    content: list[dict[str, Any]] = []
    for segment in segments:
        if isinstance(segment, Call):
            content.append(_opened(segment) | {"input": segment.arguments})
            continue
        name = _FIELDS[type(segment)]
        if not (content and content[-1]["type"] == name):
            content.append(_opened(segment))
        content[-1][name] += segment.text
    return reply.message(
        content or [_opened(Text(""))],
        **_stop(reply, visible, sequence, has_calls=bool(parts.calls)),
        usage=_usage(reply, response),
        **policy_fields(sequence),
    )


async def stream(reply: MessageReply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Yield the message as server-sent events. An error is the last event."""
    visible, blocks = reply.visible(), _Blocks(reply.format)
    nothing_yet = {"input_tokens": len(reply.body.prompt), "output_tokens": 0}
    yield _event("message_start", message=reply.message([], usage=nothing_yet))
    yield _event("ping")
    try:
        async for happened in events:
            if isinstance(happened, Idle):
                yield _event("ping")
            elif isinstance(happened, NewTokens):
                for written in blocks.push(visible.push(happened.tokens)):
                    yield written
            elif isinstance(happened, Ended):
                for written in _end(reply, visible, blocks, happened.response):
                    yield written
    except REFUSED as error:
        refused = anthropic_error(refusal_of(error), reply.request_id)
        yield event(refused.model_dump(), "error")


class _Blocks:
    """Content blocks of a stream, each opened by its first segment and closed by the next block."""

    def __init__(self, format: MessageFormat) -> None:
        self.parts = MessageParts(format)
        self._index = -1
        self._kind: type[Segment] | None = None

    def push(self, text: str) -> Iterator[str]:
        """Yield the events of further text."""
        yield from self._write(self.parts.push(text))

    def finish(self, text: str) -> Iterator[str]:
        """Yield the events of the last text. A message has at least one block."""
        yield from self._write([*self.parts.push(text), *self.parts.finish()])
        if self._index < 0:
            yield from self._write([Text("")])
        yield from self._close()

    def _write(self, segments: Sequence[Segment]) -> Iterator[str]:
        for segment in segments:
            if type(segment) is not self._kind or isinstance(segment, Call):
                yield from self._close()
                self._index, self._kind = self._index + 1, type(segment)
                block = _opened(segment)
                yield _event("content_block_start", index=self._index, content_block=block)
            if delta := _delta(segment):
                yield _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._kind is not None:
            yield _event("content_block_stop", index=self._index)


def _opened(segment: Segment) -> dict[str, Any]:
    """Return the empty content block of a segment."""
    if isinstance(segment, Call):
        return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}
    if isinstance(segment, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(segment: Segment) -> dict[str, str] | None:
    if isinstance(segment, Call):
        return {"type": "input_json_delta", "partial_json": json.dumps(segment.arguments)}
    if not segment.text:
        return None
    name = _FIELDS[type(segment)]
    return {"type": f"{name}_delta", name: segment.text}


def _end(reply: MessageReply, visible: VisibleText, blocks: _Blocks, response: SampleResponse) -> Iterator[str]:
    yield from blocks.finish(visible.finish())
    sequence = response.sequences[0]
    stop = _stop(reply, visible, sequence, has_calls=bool(blocks.parts.calls))
    fields = policy_fields(sequence)
    yield _event("message_delta", delta=stop, usage=_usage(reply, response), **fields)
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)


def _stop(
    reply: MessageReply, visible: VisibleText, sequence: SampledSequence, *, has_calls: bool
) -> dict[str, str | None]:
    if visible.stopped_by is not None:
        reason = "stop_sequence"
    elif sequence.stop_reason == "stop":
        reason = "tool_use" if has_calls else "end_turn"
    else:
        is_cut = len(sequence.tokens) == reply.body.max_tokens
        reason = "max_tokens" if is_cut else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": visible.stopped_by}


def _usage(reply: MessageReply, response: SampleResponse) -> dict[str, int]:
    cached = response.prompt_cache_hit_tokens or 0
    return {
        "input_tokens": len(reply.body.prompt) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
    }
