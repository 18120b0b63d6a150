"""Sample requests for an HTTP client that waits for its answer: submit, follow, and cancel on disconnect.

They have the same queue, quota and results as the sample requests of an SDK. This module handles tokens, not text.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self

from cotrain.wire.codec import decode_sample_response
from cotrain.wire.sampling import SampledSequence, SampleResponse, TopK
from cotrain_server.parser import BINARY_BYTE_WEIGHT
from cotrain_server.services import Services
from cotrain_server.text_apis.prompts import Target
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.errors import Reason, Refused, StoreError
from cotrain_store.messages.ids import OWN_SEQS, RequestId, sample_id
from cotrain_store.messages.ops import Category, Result, ResultKind
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.results.pending import Pending
from cotrain_store.sampling.token_stream import TokenFeed

#: Time in s without an event after which `Idle` is sent. Proxies close connections without traffic
#: after about a minute.
IDLE_S = 15.0
#: Maximum number of tokens in one event for tokens that arrive only with the result.
CHUNK_TOKENS = 256


class GenerationFailed(StoreError):
    """A sample request ended with a failure, whose message and category it carries."""

    def __init__(self, result: Result) -> None:
        failure = result.json()
        super().__init__(failure["error"])
        self.category: Category = failure["category"]


@dataclass(frozen=True)
class NewTokens:
    """The next tokens of one sequence. The events of a sequence contain each of its tokens once."""

    prompt: int
    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    likeliest: Sequence[TopK | None]
    """Most likely alternatives for each token; empty if not requested."""


@dataclass(frozen=True)
class Ended:
    """Completion of all sequences of one prompt."""

    prompt: int
    response: SampleResponse


@dataclass(frozen=True)
class Idle:
    """No event for IDLE_S."""


Event = NewTokens | Ended | Idle


class Generation:
    """Sample requests of one sampler for one client. Call `close` after the answer or a disconnect."""

    def __init__(self, services: Services, target: Target) -> None:
        self._services = services
        self._sampler = target.sampler
        self._max_sequence_tokens = target.pool.max_sequence_tokens
        self._running: set[RequestId] = set()
        self._tasks: list[asyncio.Task[None]] = []
        """One for each request, which puts its events into the queue."""
        self._events: asyncio.Queue[Event | asyncio.Task[None]] = asyncio.Queue()
        """Events of all requests, and each task when it has ended."""
        self._cleanup = ExitStack()

    @classmethod
    async def start(cls, services: Services, target: Target, bodies: Sequence[SampleBody]) -> Self:
        """Submit one request per prompt. If one is refused, cancel those before it.

        Raises:
            TOO_MANY_POLLS, and the errors of `SampleIntake.submit`.
        """
        generation = cls(services, target)
        quotas = await services.quotas.of(target.sampler.tenant)
        # An error in this block cancels the submitted requests. After `pop_all`, `close` does so.
        with generation._cleanup as cleanup:
            cleanup.enter_context(services.polls_by_tenant.of(target.sampler.tenant, 1, limit=quotas.polls))
            cleanup.callback(generation._cancel_unfinished)
            for prompt, body in enumerate(bodies):
                await generation._submit(prompt, body)
            generation._cleanup = cleanup.pop_all()
        return generation

    def close(self) -> None:
        """Cancel unfinished requests. Idempotent."""
        self._cleanup.close()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until all requests have ended. Raises GenerationFailed, SHUTTING_DOWN: there is no result."""
        unfinished = len(self._tasks)
        while unfinished:
            try:
                async with asyncio.timeout(IDLE_S):
                    event = await self._events.get()
            except TimeoutError:
                yield Idle()
                continue
            if isinstance(event, asyncio.Task):
                event.result()  # raises the error of a failed request
                unfinished -= 1
            else:
                yield event
                await asyncio.sleep(0)  # a long series of events must not block other tasks

    async def responses(self) -> list[SampleResponse]:
        """Return all results in the order of the prompts. Raises the same errors as `events`."""
        ended = {e.prompt: e.response async for e in self.events() if isinstance(e, Ended)}
        return [ended[prompt] for prompt in sorted(ended)]

    async def _submit(self, prompt: int, body: SampleBody) -> None:
        seq = OWN_SEQS + secrets.randbits(62)
        request = sample_id(self._sampler.id, seq)
        feed = None
        if body.stream:
            feed = self._cleanup.enter_context(self._services.token_stream.follow(request))
        self._running.add(request)
        await self._services.sample_intake.submit(self._sampler, seq, body, self._max_sequence_tokens)
        task = asyncio.create_task(self._follow(prompt, request, body, feed))
        task.add_done_callback(self._report_end)
        self._tasks.append(task)

    def _report_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs it if the client has disconnected
            self._events.put_nowait(task)

    async def _follow(self, prompt: int, request: RequestId, body: SampleBody, feed: TokenFeed | None) -> None:
        """Send the events of one request: tokens of its feed, if any, then the rest of its result."""
        sent = [0] * body.num_samples
        result = asyncio.create_task(self._result(request))
        try:
            if feed is not None:
                result.add_done_callback(lambda _: feed.close())
                await self._send_feed(prompt, feed, sent)
            response = await result
        finally:
            result.cancel()
        for sequence, sampled in enumerate(response.sequences):
            for new in _rest(prompt, sequence, sampled, sent[sequence]):
                self._events.put_nowait(new)
        self._events.put_nowait(Ended(prompt, response))

    async def _send_feed(self, prompt: int, feed: TokenFeed, sent: list[int]) -> None:
        """Send tokens of a feed until it is closed. Count them in `sent`, by sequence."""
        async for new in feed:
            # A feed may lose tokens. The tokens after a gap are left to the result.
            if new.before == sent[new.sequence]:
                sent[new.sequence] += len(new.tokens)
                self._events.put_nowait(NewTokens(prompt, new.sequence, new.tokens, new.logprobs, ()))

    async def _result(self, request: RequestId) -> SampleResponse:
        futures, hold_s = self._services.futures, self._services.long_poll_s
        while isinstance(outcome := await futures.wait(self._sampler.tenant, request, hold_s), Pending):
            if self._services.draining:
                raise Refused(Reason.SHUTTING_DOWN)
        self._running.discard(request)
        # Without the acknowledgement, the result is stored for a day instead of minutes.
        with suppress(StoreError, *CONNECTION_LOST):
            await self._services.completions.acknowledge(self._sampler, [request])
        if outcome.kind is ResultKind.FAILURE:
            raise GenerationFailed(outcome)
        payload = outcome.payload
        weight = BINARY_BYTE_WEIGHT * len(payload)
        parser, tenant = self._services.parser, self._sampler.tenant
        return await parser.run(tenant, weight, decode_sample_response, payload)

    def _cancel_unfinished(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._running:
            self._services.in_background(self._cancel(tuple(self._running)))

    async def _cancel(self, requests: Sequence[RequestId]) -> None:
        # If the store is unavailable, the requests complete without a reader.
        with suppress(StoreError, *CONNECTION_LOST):
            for request in requests:
                await self._services.sample_intake.cancel(self._sampler.tenant, request)


def policy_fields(sequence: SampledSequence) -> dict[str, Any]:
    """Return the policy spans of a sequence as a field beyond the original API; {} if its result is without them."""
    spans = [span.model_dump() for span in sequence.policy_spans or ()]
    return {"policy_spans": spans} if spans else {}


def _rest(prompt: int, sequence: int, sampled: SampledSequence, sent: int) -> Iterator[NewTokens]:
    """Yield the tokens of a sequence after the first `sent` ones, in chunks."""
    for start in range(sent, len(sampled.tokens), CHUNK_TOKENS):
        span = slice(start, start + CHUNK_TOKENS)
        logprobs, likeliest = sampled.logprobs or [], sampled.topk_logprobs or []
        yield NewTokens(prompt, sequence, sampled.tokens[span], logprobs[span], likeliest[span])
