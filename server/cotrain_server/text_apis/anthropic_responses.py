"""Anthropic's response format: a message of content blocks."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cotrain.wire.sampling import SampledSequence, SampleResponse
from cotrain_server.text_apis.answers import Reply, SequenceText, event
from cotrain_server.text_apis.anthropic_requests import anthropic_error
from cotrain_server.text_apis.generation import Ended, NewTokens, policy_fields
from cotrain_server.text_apis.message_parts import Reasoning, Segment, Text
from cotrain_server.text_apis.route import Refusal
from cotrain_server.text_apis.tools import Call

#: Field with the text of a block, by the type of its segments.
_FIELDS: dict[type[Segment], str] = {Text: "text", Reasoning: "thinking"}


class MessageAnswer:
    """Message to one request (`answers.Format`). A block is opened by its first segment and closed by the next block."""

    def __init__(self, reply: Reply, request_id: str) -> None:
        self.idle = _event("ping")
        self._reply = reply
        self._request_id = request_id
        self._text = SequenceText(reply)
        self._content: list[dict[str, Any]] = []

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """Return the complete message."""
        (response,) = responses
        (sequence,) = response.sequences
        for _ in (*self._write(self._text.push(sequence.tokens)), *self._finish()):
            pass  # the blocks stay
        return self._message(**self._stop(sequence), usage=self._usage(response), **policy_fields(sequence))

    def begin(self) -> Iterable[str]:
        """Return the start of an empty message."""
        nothing_yet = {"input_tokens": len(self._reply.bodies[0].prompt), "output_tokens": 0}
        return [_event("message_start", message=self._message(usage=nothing_yet)), self.idle]

    def push(self, new: NewTokens) -> Iterable[str]:
        """Return the events of new tokens."""
        return self._write(self._text.push(new.tokens))

    def end(self, ended: Ended) -> Iterator[str]:
        """Return the events of the withheld text, and the stop reason."""
        yield from self._finish()
        (sequence,) = ended.response.sequences
        usage, fields = self._usage(ended.response), policy_fields(sequence)
        yield _event("message_delta", delta=self._stop(sequence), usage=usage, **fields)
        yield _event("message_stop")

    def failure(self, refusal: Refusal) -> str:
        """Return the error as an event."""
        return event(anthropic_error(refusal, self._request_id).model_dump(), "error")

    def _write(self, segments: Sequence[Segment]) -> Iterator[str]:
        for segment in segments:
            block = _opened(segment)
            if isinstance(segment, Call) or not self._content or self._content[-1]["type"] != block["type"]:
                yield from self._close()
                yield _event("content_block_start", index=len(self._content), content_block=block)
                self._content.append(block)
            if delta := _add(self._content[-1], segment):
                yield _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _finish(self) -> Iterator[str]:
        """Write the withheld text. A message has at least one block."""
        yield from self._write(self._text.finish())
        if not self._content:
            yield from self._write([Text("")])
        yield from self._close()

    def _close(self) -> Iterator[str]:
        if self._content:
            yield _event("content_block_stop", index=len(self._content) - 1)

    def _message(self, **rest: Any) -> dict[str, Any]:
        return {
            "id": f"msg_{self._reply.id}",
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            **rest,
        }

    def _stop(self, sequence: SampledSequence) -> dict[str, str | None]:
        if self._text.stopped_by is not None:
            reason = "stop_sequence"
        elif sequence.stop_reason == "stop":
            reason = "tool_use" if self._text.has_calls else "end_turn"
        else:
            is_cut = len(sequence.tokens) == self._reply.bodies[0].max_tokens
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": self._text.stopped_by}

    def _usage(self, response: SampleResponse) -> dict[str, int]:
        cached = response.prompt_cache_hit_tokens or 0
        return {
            "input_tokens": len(self._reply.bodies[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
        }


def _opened(segment: Segment) -> dict[str, Any]:
    """Return the empty content block of a segment."""
    if isinstance(segment, Call):
        return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": {}}
    if isinstance(segment, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _add(block: dict[str, Any], segment: Segment) -> dict[str, str] | None:
    """Add a segment to its block, and return the difference; None for an empty text."""
    if isinstance(segment, Call):
        block["input"] = segment.arguments
        return {"type": "input_json_delta", "partial_json": json.dumps(segment.arguments)}
    name = _FIELDS[type(segment)]
    block[name] += segment.text
    return {"type": f"{name}_delta", name: segment.text} if segment.text else None


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)
