"""OpenAI's response formats of completions and chat completions: one object, or chunks of its choices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar

from cotrain.wire.sampling import SampledSequence, SampleResponse, TopK
from cotrain_server.services import Services
from cotrain_server.text_apis.answers import Reply, SequenceText, event
from cotrain_server.text_apis.generation import Ended, NewTokens, policy_fields
from cotrain_server.text_apis.message_parts import Reasoning, Segment, Text, text_in
from cotrain_server.text_apis.openai_requests import CompletionRequest, GenerationRequest, openai_error
from cotrain_server.text_apis.prompts import find_target, prompt_bodies, text_weight, written_characters
from cotrain_server.text_apis.route import Refusal
from cotrain_server.text_apis.token_texts import Part, TokenTexts
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_server.text_apis.tools import Call
from cotrain_store.messages.ids import TenantId

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

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    #: Part before all tokens: the role of the message.
    opening: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}

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
        """Return one entry per token."""
        return {"content": token_entries(tokenizer, scored, parts), "refusal": None}


class CompletionShape:
    """Format of completions: a text."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    opening = None

    def chunk(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return the text, or its next part."""
        return {"text": text_in(segments)}

    whole = chunk

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


def token_entries(tokenizer: Tokenizer, scored: Sequence[Scored], parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return an entry for each token of a message. The bytes of all entries are those of the text."""
    return [
        {
            **_entry(tokenizer, each.token, each.logprob, part),
            "bytes": list(part.content),
            "top_logprobs": [_entry(tokenizer, *likely, part) for likely in each.likeliest or ()],
        }
        for each, part in zip(scored, parts, strict=True)
    ]


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
                "function": {"name": call.name, "arguments": call.text},
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


async def completion_reply(
    services: Services, tenant: TenantId, wanted: CompletionRequest, body_weight: int = 0
) -> Reply:
    """Return the reply to a completion, whose body has a weight. Raises the errors of `find_target` and `prompt_bodies`."""
    target, prompts = await find_target(services, tenant, wanted.model), wanted.prompts
    make = partial(
        prompt_bodies,
        target,
        prompts,
        wanted.body,
        echo=bool(wanted.echo),
        special=wanted.add_special_tokens is not False,
    )
    weight = body_weight + text_weight(written_characters(prompts))
    bodies, echoes = await services.parser.run(tenant, weight, make)
    return Reply(wanted.model, target, bodies, wanted.stop_strings, continues=True, echoes=echoes)


class Choice:
    """A choice under construction: one sequence of one prompt."""

    def __init__(self, reply: Reply, shape: Shape, prompt: int, sequence: int, *, wants_logprobs: bool) -> None:
        self._reply, self._shape, self._wants_logprobs = reply, shape, wants_logprobs
        self._prompt = reply.bodies[prompt].prompt
        self._index = prompt * reply.bodies[prompt].num_samples + sequence
        self._echo = reply.echoes[prompt] if reply.echoes else ""
        self._text = SequenceText(reply, prompt)

    def whole(self, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]:
        """Return the complete choice."""
        echo = [Text(self._echo)] if self._echo else []
        content = self._shape.whole([*echo, *self._text.push(sequence.tokens), *self._text.finish()])
        if not self._wants_logprobs:
            return self._written(content, ended=sequence)
        own = scored(sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs)
        texts, parts = self._text.tokens, list[Part]()
        if echo:
            texts = TokenTexts(self._reply.tokenizer, self._reply.target.pool.eos_token_ids, begins=True)
            own = scored(self._prompt, response.prompt_logprobs or [], response.topk_prompt_logprobs) + own
            parts = texts.of_prompt(self._prompt, self._echo)
        parts = texts.with_rest(parts + texts.of_answer(sequence.tokens))
        return self._written(content, self._logprobs(own, parts), sequence)

    def opening(self) -> dict[str, Any] | None:
        """Return the part before all tokens, or None."""
        content = self._shape.chunk([Text(self._echo)]) if self._echo else self._shape.opening
        return None if content is None else self._written(content)

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Return the new part, or None while no text is final."""
        segments = self._text.push(new.tokens)
        content = self._shape.chunk(segments)
        if not self._wants_logprobs:
            return self._written(content) if segments else None
        own = scored(new.tokens, new.logprobs, new.likeliest)
        return self._written(content, self._logprobs(own, self._text.tokens.of_answer(new.tokens)))

    def ending(self, sequence: SampledSequence) -> dict[str, Any]:
        """Return the withheld text and the stop reason."""
        return self._written(self._shape.chunk(self._text.finish()), ended=sequence)

    def _logprobs(self, own: list[Scored], parts: list[Part]) -> dict[str, Any] | None:
        return self._shape.logprobs(self._reply.tokenizer, own, parts) if own else None

    def _written(
        self, content: dict[str, Any], logprobs: dict[str, Any] | None = None, ended: SampledSequence | None = None
    ) -> dict[str, Any]:
        reason = ended.stop_reason if ended else None
        return {
            "index": self._index,
            **content,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if reason == "stop" and self._text.has_calls else reason,
            **(policy_fields(ended) if ended else {}),
        }


class CompletionAnswer:
    """Completion or chat completion of one request (`answers.Format`)."""

    idle = STILL_HERE

    def __init__(self, wanted: GenerationRequest, reply: Reply, shape: Shape, *, wants_logprobs: bool) -> None:
        self._reply, self._shape, self._wants_usage = reply, shape, wanted.wants_usage
        self._choices = {
            (prompt, number): Choice(reply, shape, prompt, number, wants_logprobs=wants_logprobs)
            for prompt, body in enumerate(reply.bodies)
            for number in range(body.num_samples)
        }
        self._ended: list[SampleResponse] = []

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = [
            self._choices[prompt, number].whole(response, sequence)
            for prompt, response in enumerate(responses)
            for number, sequence in enumerate(response.sequences)
        ]
        return {**self._object(self._shape.whole_object, choices), "usage": usage(self._reply, responses)}

    def begin(self) -> Iterable[str]:
        """Return the openings of all choices."""
        openings = (choice.opening() for choice in self._choices.values())
        return [self._chunk(opening) for opening in openings if opening]

    def push(self, new: NewTokens) -> Iterable[str]:
        """Return the next part of a choice."""
        chunk = self._choices[new.prompt, new.sequence].chunk(new)
        return [self._chunk(chunk)] if chunk else []

    def end(self, ended: Ended) -> Iterator[str]:
        """Return the ends of a prompt's choices, and after the last prompt the usage."""
        self._ended.append(ended.response)
        for number, sequence in enumerate(ended.response.sequences):
            yield self._chunk(self._choices[ended.prompt, number].ending(sequence))
        if len(self._ended) < len(self._reply.bodies):
            return
        if self._wants_usage:
            last = self._object(self._shape.chunk_object, [])
            yield event({**last, "usage": usage(self._reply, self._ended)})
        yield DONE

    def failure(self, refusal: Refusal) -> str:
        """Return the error as an event."""
        return event(openai_error(refusal).model_dump())

    def _chunk(self, choice: dict[str, Any]) -> str:
        chunk = self._object(self._shape.chunk_object, [choice])
        return event({**chunk, "usage": None} if self._wants_usage else chunk)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._shape.prefix + self._reply.id,
            "object": kind,
            "created": self._reply.created,
            "model": self._reply.model,
            "choices": choices,
        }


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
