"""Write what was sampled as OpenAI's API does, at once or chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotrain_server.text_apis.detokenizer import VisibleText
from cotrain_server.text_apis.generation import Ended, Idle, NewTokens
from cotrain_server.text_apis.openai_choices import scored
from cotrain_server.text_apis.openai_requests import openai_error
from cotrain_server.text_apis.route import REFUSED, event, refusal_of
from cotrain_server.text_apis.token_texts import TokenTexts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from cotrain.wire.sampling import SampledSequence, SampleResponse
    from cotrain_server.text_apis.detokenizer import Tokenizer
    from cotrain_server.text_apis.generation import Event
    from cotrain_server.text_apis.model_names import Target
    from cotrain_server.text_apis.openai_choices import Scored, Shape
    from cotrain_server.text_apis.token_texts import Part
    from cotrain_store.bodies.sample_body import SampleBody

STILL_HERE = ": still working\n\n"
DONE = event("[DONE]")


@dataclass(frozen=True)
class Reply:
    """What all answers to one request have in common."""

    shape: Shape
    id: str
    created: int
    model: str
    target: Target
    bodies: Sequence[SampleBody]
    """One per prompt."""
    stop: tuple[str, ...]
    wants_logprobs: bool
    wants_usage: bool
    """Whether a stream shall end with what it cost."""
    echoes: Sequence[str] = ()
    """What the choices of each prompt begin with, where it was asked for."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What tokens are written with."""
        return self.target.language.tokenizer

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Write one object of the answer."""
        return {
            "id": self.shape.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Choice:
    """One choice in the making."""

    def __init__(self, reply: Reply, prompt: int, sequence: int) -> None:
        self._reply = reply
        self._prompt = prompt
        self._index = prompt * reply.bodies[prompt].num_samples + sequence
        self._echo = reply.echoes[prompt] if reply.echoes else ""
        final, before = reply.target.pool.eos_token_ids, reply.bodies[prompt].prompt
        begins = reply.shape.begins or not reply.tokenizer.last_with_text(before)
        self._visible = VisibleText(
            reply.tokenizer, reply.stop, final, before=before, begins=begins
        )
        self._texts = (
            TokenTexts(reply.tokenizer, final, begins=True)
            if self._echo
            else TokenTexts(reply.tokenizer, final, before, begins=begins)
        )

    def whole(self, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]:
        """Write it at once."""
        text = self._echo + self._visible.push(sequence.tokens) + self._visible.finish()
        content = self._reply.shape.whole(text)
        if not self._reply.wants_logprobs:
            return self._written(content, finish_reason=sequence.stop_reason)
        own = scored(sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs)
        parts: list[Part] = []
        if self._echo:
            own = self._scored_prompt(response) + own
            parts = self._texts.of_prompt(self._reply.bodies[self._prompt].prompt, self._echo)
        parts += self._texts.of_answer(sequence.tokens)
        logprobs = self._logprobs(own, self._texts.ended(parts))
        return self._written(content, logprobs, sequence.stop_reason)

    def opening(self) -> dict[str, Any] | None:
        """Write what comes before all tokens, if anything does."""
        shape = self._reply.shape
        content = shape.chunk(self._echo) if self._echo else shape.opening()
        return None if content is None else self._written(content)

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Write what is new; nothing while no text is certain."""
        content = self._reply.shape.chunk(text := self._visible.push(new.tokens))
        if not self._reply.wants_logprobs:
            return self._written(content) if text else None
        own = scored(new.tokens, new.logprobs, new.likeliest)
        return self._written(content, self._logprobs(own, self._texts.of_answer(new.tokens)))

    def ending(self, sequence: SampledSequence) -> dict[str, Any]:
        """Write what was withheld, and why it ends here."""
        rest = self._reply.shape.chunk(self._visible.finish())
        return self._written(rest, finish_reason=sequence.stop_reason)

    def _scored_prompt(self, response: SampleResponse) -> list[Scored]:
        prompt = self._reply.bodies[self._prompt].prompt
        return scored(prompt, response.prompt_logprobs or [], response.topk_prompt_logprobs)

    def _logprobs(self, own: list[Scored], parts: list[Part]) -> dict[str, Any] | None:
        return self._reply.shape.logprobs(self._reply.tokenizer, own, parts) if own else None

    def _written(
        self,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def answer(reply: Reply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Write the whole answer."""
    choices = [
        Choice(reply, prompt, number).whole(response, sequence)
        for prompt, response in enumerate(responses)
        for number, sequence in enumerate(response.sequences)
    ]
    return {**reply.object(reply.shape.whole_object, choices), "usage": usage(reply, responses)}


async def chunks(reply: Reply, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Write the answer as server-sent events; an error is the last of them."""
    choices = {
        (prompt, number): Choice(reply, prompt, number)
        for prompt, body in enumerate(reply.bodies)
        for number in range(body.num_samples)
    }
    responses: list[SampleResponse] = []
    for choice in choices.values():
        if opening := choice.opening():
            yield _chunk(reply, opening)
    try:
        async for happened in events:
            if isinstance(happened, Idle):
                yield STILL_HERE
            for written in _new_choices(choices, happened):
                yield _chunk(reply, written)
            if isinstance(happened, Ended):
                responses.append(happened.response)
    except REFUSED as error:
        yield event(openai_error(refusal_of(error)).model_dump())
        return
    if reply.wants_usage:
        last = reply.object(reply.shape.chunk_object, [])
        yield event({**last, "usage": usage(reply, responses)})
    yield DONE


def usage(reply: Reply, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    """Count tokens: a prompt once, whatever the number of its choices."""
    asked = sum(len(body.prompt) for body in reply.bodies)
    given = sum(len(each.tokens) for response in responses for each in response.sequences)
    cached = sum(response.prompt_cache_hit_tokens or 0 for response in responses)
    return {
        "prompt_tokens": asked,
        "completion_tokens": given,
        "total_tokens": asked + given,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _new_choices(
    choices: Mapping[tuple[int, int], Choice], happened: Event
) -> list[dict[str, Any]]:
    if isinstance(happened, NewTokens):
        chunk = choices[happened.prompt, happened.sequence].chunk(happened)
        return [chunk] if chunk else []
    if isinstance(happened, Ended):
        return [
            choices[happened.prompt, number].ending(sequence)
            for number, sequence in enumerate(happened.response.sequences)
        ]
    return []


def _chunk(reply: Reply, choice: dict[str, Any]) -> str:
    chunk = reply.object(reply.shape.chunk_object, [choice])
    return event({**chunk, "usage": None} if reply.wants_usage else chunk)
