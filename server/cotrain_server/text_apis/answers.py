"""Answers to requests for text: the part that all formats share, whole or as server-sent events.

A format converts the events of a generation to its own. Its whole answer is made from the same text.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from cotrain.wire.sampling import SampleResponse
from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.http.long_poll import while_connected
from cotrain_server.http.responses import FiniteJSONResponse, finite_json
from cotrain_server.services import Services
from cotrain_server.text_apis.generation import Ended, Event, Generation, Idle, NewTokens
from cotrain_server.text_apis.message_parts import MessageFormat, MessageParts, Segment, shown_tokens
from cotrain_server.text_apis.prompts import Chat, Target, accepted_chat, find_target
from cotrain_server.text_apis.route import ANSWERED, Refusal, refusal_of
from cotrain_server.text_apis.token_texts import TokenTexts, VisibleText
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.messages.ids import TenantId


@dataclass(frozen=True)
class Reply:
    """Data of all answers to one request."""

    model: str
    target: Target
    bodies: Sequence[SampleBody]  # one per prompt
    stop: tuple[str, ...]
    continues: bool  # True if the text continues its prompt; False if it begins a message
    format: MessageFormat = MessageFormat()  # noqa: RUF009  # it is frozen
    echoes: Sequence[str] = ()  # Text before the answers of each prompt, if requested
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the answer's text."""
        return self.target.language.tokenizer


async def chat_reply(
    services: Services,
    tenant: TenantId,
    model: str,
    chat: Chat,
    body_of: Callable[[list[int]], SampleBody],
    stop: tuple[str, ...],
) -> Reply:
    """Return the reply to a chat. Raises the errors of `find_target` and `chat_body`."""
    target = await find_target(services, tenant, model)
    body, format = await accepted_chat(services, target, chat, body_of)
    return Reply(model, target, [body], stop, continues=chat.continues, format=format)


class SequenceText:
    """Text of one sequence, as parts of its message and as parts of its tokens."""

    def __init__(self, reply: Reply, prompt: int = 0) -> None:
        tokenizer, final = reply.tokenizer, reply.target.pool.eos_token_ids
        before, shown = reply.bodies[prompt].prompt, shown_tokens(reply.tokenizer, reply.format)
        begins = not (reply.continues and tokenizer.last_with_text(before))
        self._visible = VisibleText(tokenizer, reply.stop, final, before=before, begins=begins, shown=shown)
        self._parts = MessageParts(reply.format)
        self.tokens = TokenTexts(tokenizer, final, before, begins=begins)

    @property
    def has_calls(self) -> bool:
        """True if the message has a tool call so far."""
        return bool(self._parts.calls)

    @property
    def stopped_by(self) -> str | None:
        """Stop string that ended the text; None if none did."""
        return self._visible.stopped_by

    def push(self, tokens: Iterable[int]) -> list[Segment]:
        """Add tokens, and return the segments that have become final."""
        return self._parts.push(self._visible.push(tokens))

    def finish(self) -> list[Segment]:
        """Return the withheld segments after the last token."""
        return self._parts.push(self._visible.finish()) + self._parts.finish()


class Format(Protocol):
    """Answer to one request in the format of an API. Its events are strings of `event`."""

    #: Event that keeps a connection open.
    idle: str

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """Return the complete answer."""

    def begin(self) -> Iterable[str]:
        """Return the events before all tokens."""

    def push(self, new: NewTokens) -> Iterable[str]:
        """Return the events of new tokens."""

    def end(self, ended: Ended) -> Iterable[str]:
        """Return the events at the end of a prompt's sequences, and after the last prompt those of the answer."""

    def failure(self, refusal: Refusal) -> str:
        """Return the last event of an answer that failed."""


async def generate(
    request: Request, services: Services, reply: Reply, format: Format, is_streamed: bool | None
) -> Response:
    """Run the sample requests of a reply, and return their answer in a format."""
    generation = await Generation.start(services, reply.target, reply.bodies)
    if is_streamed:
        return EventStream(_stream(generation, format), generation.close)
    complete = await finished(request, generation)
    if complete is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return FiniteJSONResponse(await asyncio.to_thread(format.whole, complete))


async def finished(request: Request, generation: Generation) -> list[SampleResponse] | None:
    """Return all results. If the client disconnects, cancel the requests and return None."""
    try:
        return await while_connected(request.receive, generation.responses())
    finally:
        generation.close()


async def _stream(generation: Generation, format: Format) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. An error is the last event."""
    for sent in format.begin():
        yield sent
    try:
        async for happened in generation.events():
            for sent in _sent(format, happened):
                yield sent
    except ANSWERED as error:
        yield format.failure(refusal_of(error))


def _sent(format: Format, happened: Event) -> Iterable[str]:
    if isinstance(happened, Idle):
        return [format.idle]
    return format.push(happened) if isinstance(happened, NewTokens) else format.end(happened)


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else finite_json(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. `close` is called after the last event or a disconnect."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        # otherwise nginx buffers events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._close = close

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
