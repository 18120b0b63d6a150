"""Conversion of samples to OpenAI's response format, complete or streamed."""

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from cotrain.wire.sampling import SampledSequence, SampleResponse, TopK
from cotrain_server.text_apis.generation import Event, Idle, NewTokens, policy_fields
from cotrain_server.text_apis.message_parts import (
    MessageFormat,
    MessageParts,
    Reasoning,
    Segment,
    Text,
    shown_tokens,
    text_in,
)
from cotrain_server.text_apis.openai_requests import openai_error
from cotrain_server.text_apis.prompts import Target
from cotrain_server.text_apis.route import REFUSED, event, refusal_of
from cotrain_server.text_apis.token_texts import Part, TokenTexts, VisibleText
from cotrain_server.text_apis.tokenizer_cache import Tokenizer
from cotrain_server.text_apis.tools import Call
from cotrain_store.bodies.sample_body import SampleBody

#: Value of OpenAI's API for the log-prob of an almost impossible token; JSON has no infinity.
IMPOSSIBLE = -9999.0
#: Comment that keeps a connection open.
STILL_HERE = ": still working\n\n"
DONE = event("[DONE]")


@dataclass(frozen=True)
class Scored:
    """One token with its log-prob and the most likely alternatives."""

    token: int
    logprob: float | None  # None for the first token of the prompt, which has no context
    likeliest: TopK | None


class ChatShape:
    """Format of chat/completions: a message. Each call in a stream is one part, with its index."""

    #: True if the text is separate, like a message; False if it continues the prompt.
    begins = True

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        """Return the role of the message."""
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the next part of the message."""
        written = _message(segments)
        return {"delta": {name: each for name, each in written.items() if each}}

    def whole(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the message. With calls alone, its text is null."""
        written = _message(segments)
        for call in written.get("tool_calls", ()):
            del call["index"]
        if "tool_calls" in written:
            written["content"] = written["content"] or None
        return {"message": {"role": "assistant", "refusal": None, **written}}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]) -> dict[str, Any]:
        """Return one entry per token. The bytes of all entries are those of the text."""
        content = [
            {
                **_entry(tokenizer, each.token, each.logprob, part),
                "bytes": list(part.content),
                "top_logprobs": [_entry(tokenizer, *likely, part) for likely in each.likeliest or ()],
            }
            for each, part in zip(scored, parts, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """Format of completions: a text."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    begins = False

    def opening(self) -> None:
        """Return None, because a completion has no opening."""

    def chunk(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the next part of the text."""
        return {"text": text_in(segments)}

    def whole(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the text."""
        return {"text": text_in(segments)}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]) -> dict[str, Any]:
        """Return columns. A token is always among its alternatives, even if that is one more than requested."""
        likeliest = [
            None if each.likeliest is None else _named(tokenizer, each, begins=part.begins)
            for each, part in zip(scored, parts, strict=True)
        ]
        return {
            "tokens": [part.text for part in parts],
            "token_logprobs": [_finite(each.logprob) for each in scored],
            "top_logprobs": likeliest if any(likeliest) else None,
            "text_offset": [part.offset for part in parts],
        }


Shape = ChatShape | CompletionShape


def scored(
    tokens: Iterable[int], logprobs: Iterable[float | None], likeliest: Iterable[TopK | None] | None
) -> list[Scored]:
    """Combine the data of each token."""
    filled = chain(likeliest or (), repeat(None))
    return [Scored(*each) for each in zip(tokens, logprobs, filled, strict=False)]


def _message(segments: Sequence[Segment]) -> dict[str, Any]:
    """Return the fields of a message that some segments make."""
    written: dict[str, Any] = {"content": text_in(segments)}
    if reasoning := "".join(each.text for each in segments if isinstance(each, Reasoning)):
        written["reasoning_content"] = reasoning
    if calls := [each for each in segments if isinstance(each, Call)]:
        written["tool_calls"] = [
            {
                "index": call.index,
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]
    return written


def _named(tokenizer: Tokenizer, each: Scored, *, begins: bool) -> dict[str, float | None]:
    """Return the alternatives by name. If two have one name, the less likely is listed by its id."""
    own = (each.token, each.logprob)
    rows = [own, *(likely for likely in each.likeliest or () if likely[0] != each.token)]
    named: dict[str, float | None] = {}
    for token, logprob in rows:
        name = tokenizer.token_name(token, begins=begins)
        named[f"token_id:{token}" if name in named else name] = _finite(logprob)
    return named


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None, part: Part) -> dict[str, Any]:
    is_named = tokenizer.is_special(token)
    return {
        "token": tokenizer.token_name(token, begins=part.begins),
        "logprob": _finite(logprob),
        "bytes": [] if is_named else list(tokenizer.token_bytes(token, begins=part.begins)),
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, IMPOSSIBLE)


@dataclass(frozen=True)
class Reply:
    """Common data of all answers to one request."""

    shape: Shape
    id: str
    created: int
    model: str
    target: Target
    bodies: Sequence[SampleBody]  # one body per prompt
    stop: tuple[str, ...]
    wants_logprobs: bool
    wants_usage: bool  # True if a stream must end with its token usage
    format: MessageFormat = MessageFormat()  # noqa: RUF009  # it is frozen
    """Parts of a message in a chat."""
    echoes: Sequence[str] = ()  # Text before the choices of each prompt, if `echo` was requested

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the answer's text."""
        return self.target.language.tokenizer

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one object of the answer."""
        return {
            "id": self.shape.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Choice:
    """A choice under construction."""

    def __init__(self, reply: Reply, prompt: int, sequence: int) -> None:
        self._reply = reply
        self._prompt = prompt
        self._index = prompt * reply.bodies[prompt].num_samples + sequence
        self._echo = reply.echoes[prompt] if reply.echoes else ""
        final, before = reply.target.pool.eos_token_ids, reply.bodies[prompt].prompt
        begins = reply.shape.begins or not reply.tokenizer.last_with_text(before)
        self._parts = MessageParts(reply.format)
        self._visible = VisibleText(
            reply.tokenizer,
            reply.stop,
            final,
            before=before,
            begins=begins,
            shown=shown_tokens(reply.tokenizer, reply.format),
        )
        self._texts = (
            TokenTexts(reply.tokenizer, final, begins=True)
            if self._echo
            else TokenTexts(reply.tokenizer, final, before, begins=begins)
        )

    def whole(self, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]:
        """Return the complete choice."""
        segments = [*self._parts.push(self._echo + self._visible.push(sequence.tokens)), *self._rest()]
        content = self._reply.shape.whole(segments)
        if not self._reply.wants_logprobs:
            return self._written(content, ended=sequence)
        own = scored(sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs)
        parts: list[Part] = []
        if self._echo:
            own = self._scored_prompt(response) + own
            parts = self._texts.of_prompt(self._reply.bodies[self._prompt].prompt, self._echo)
        parts += self._texts.of_answer(sequence.tokens)
        logprobs = self._logprobs(own, self._texts.with_rest(parts))
        return self._written(content, logprobs, sequence)

    def opening(self) -> dict[str, Any] | None:
        """Return the part before all tokens, or None."""
        shape = self._reply.shape
        content = shape.chunk([Text(self._echo)]) if self._echo else shape.opening()
        return None if content is None else self._written(content)

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Return the new part, or None while no text is final."""
        segments = self._parts.push(self._visible.push(new.tokens))
        content = self._reply.shape.chunk(segments)
        if not self._reply.wants_logprobs:
            return self._written(content) if segments else None
        own = scored(new.tokens, new.logprobs, new.likeliest)
        return self._written(content, self._logprobs(own, self._texts.of_answer(new.tokens)))

    def ending(self, sequence: SampledSequence) -> dict[str, Any]:
        """Return the withheld text and the stop reason."""
        rest = self._reply.shape.chunk(self._rest())
        return self._written(rest, ended=sequence)

    def _rest(self) -> list[Segment]:
        return [*self._parts.push(self._visible.finish()), *self._parts.finish()]

    def _reason(self, sequence: SampledSequence) -> str:
        is_call = self._parts.calls and sequence.stop_reason == "stop"
        return "tool_calls" if is_call else sequence.stop_reason

    def _scored_prompt(self, response: SampleResponse) -> list[Scored]:
        prompt = self._reply.bodies[self._prompt].prompt
        return scored(prompt, response.prompt_logprobs or [], response.topk_prompt_logprobs)

    def _logprobs(self, own: list[Scored], parts: list[Part]) -> dict[str, Any] | None:
        return self._reply.shape.logprobs(self._reply.tokenizer, own, parts) if own else None

    def _written(
        self, content: dict[str, Any], logprobs: dict[str, Any] | None = None, ended: SampledSequence | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self._reason(ended) if ended else None,
            **(policy_fields(ended) if ended else {}),
        }


def answer(reply: Reply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Return the complete answer."""
    choices = [
        Choice(reply, prompt, number).whole(response, sequence)
        for prompt, response in enumerate(responses)
        for number, sequence in enumerate(response.sequences)
    ]
    return {**reply.object(reply.shape.whole_object, choices), "usage": usage(reply, responses)}


async def parts(
    reply: Reply, events: AsyncIterator[Event], ended: list[SampleResponse]
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the parts of all choices, and None to keep the connection open. Add results to `ended`.

    Raises the errors of `Generation.events`.
    """
    choices = {
        (prompt, number): Choice(reply, prompt, number)
        for prompt, body in enumerate(reply.bodies)
        for number in range(body.num_samples)
    }
    for choice in choices.values():
        if opening := choice.opening():
            yield opening
    async for happened in events:
        if isinstance(happened, Idle):
            yield None
        elif isinstance(happened, NewTokens):
            if chunk := choices[happened.prompt, happened.sequence].chunk(happened):
                yield chunk
        else:
            for number, sequence in enumerate(happened.response.sequences):
                yield choices[happened.prompt, number].ending(sequence)
            ended.append(happened.response)


async def chunks(reply: Reply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. An error is the last event."""
    responses: list[SampleResponse] = []
    try:
        async for written in parts(reply, events, responses):
            yield STILL_HERE if written is None else _chunk(reply, written)
    except REFUSED as error:
        yield event(openai_error(refusal_of(error)).model_dump())
        return
    if reply.wants_usage:
        last = reply.object(reply.shape.chunk_object, [])
        yield event({**last, "usage": usage(reply, responses)})
    yield DONE


def usage(reply: Reply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Return token counts. A prompt counts once for all its choices."""
    prompt_tokens = sum(len(body.prompt) for body in reply.bodies)
    completion_tokens = sum(len(each.tokens) for response in responses for each in response.sequences)
    cached = sum(response.prompt_cache_hit_tokens or 0 for response in responses)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chunk(reply: Reply, choice: dict[str, Any]) -> str:
    chunk = reply.object(reply.shape.chunk_object, [choice])
    return event({**chunk, "usage": None} if reply.wants_usage else chunk)
