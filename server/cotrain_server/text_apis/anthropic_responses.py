"""Conversion of samples to Anthropic's response format, complete or streamed."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from cotrain.wire.sampling import SampledSequence, SampleResponse
from cotrain_server.text_apis.anthropic_requests import anthropic_error
from cotrain_server.text_apis.generation import Ended, Event, Idle, NewTokens
from cotrain_server.text_apis.prompts import Target
from cotrain_server.text_apis.route import REFUSED, event, refusal_of
from cotrain_server.text_apis.token_texts import VisibleText
from cotrain_store.bodies.sample_body import SampleBody


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

    def visible(self) -> VisibleText:
        """Return the empty text of the message."""
        return VisibleText(
            self.target.language.tokenizer,
            self.stop,
            self.target.pool.eos_token_ids,
            before=self.body.prompt,
            begins=self.begins,
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


def answer(reply: MessageReply, response: SampleResponse) -> dict[str, Any]:
    """Return the complete message. It has one text block, which may be empty."""
    visible, (sequence,) = reply.visible(), response.sequences
    text = visible.push(sequence.tokens) + visible.finish()
    return reply.message(
        [{"type": "text", "text": text}],
        **_stop(reply, visible, sequence),
        usage=_usage(reply, response),
    )


async def stream(reply: MessageReply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Yield the message as server-sent events. An error is the last event."""
    visible = reply.visible()
    nothing_yet = {"input_tokens": len(reply.body.prompt), "output_tokens": 0}
    yield _event("message_start", message=reply.message([], usage=nothing_yet))
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    yield _event("ping")
    try:
        async for happened in events:
            if isinstance(happened, Idle):
                yield _event("ping")
            elif isinstance(happened, NewTokens):
                for delta in _deltas(visible.push(happened.tokens)):
                    yield delta
            elif isinstance(happened, Ended):
                for delta in _end(reply, visible, happened.response):
                    yield delta
    except REFUSED as error:
        refused = anthropic_error(refusal_of(error), reply.request_id)
        yield event(refused.model_dump(), "error")


def _end(reply: MessageReply, visible: VisibleText, response: SampleResponse) -> Iterator[str]:
    yield from _deltas(visible.finish())
    yield _event("content_block_stop", index=0)
    stop = _stop(reply, visible, response.sequences[0])
    yield _event("message_delta", delta=stop, usage=_usage(reply, response))
    yield _event("message_stop")


def _deltas(text: str) -> Iterator[str]:
    if text:
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)


def _stop(
    reply: MessageReply, visible: VisibleText, sequence: SampledSequence
) -> dict[str, str | None]:
    if visible.stopped_by is not None:
        reason = "stop_sequence"
    elif sequence.stop_reason == "stop":
        reason = "end_turn"
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
