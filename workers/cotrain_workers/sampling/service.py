"""Sampling service of a worker: claim sample requests from Redis, decode them, store the results.

A tenant's claimed requests are limited to those that the decoder can soon begin. The others wait in Redis, where
tenants alternate and a cancelled request is simply deleted. A claimed request without a result (this process
crashes, or drains) runs again on some worker, and yields the same tokens.
"""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import structlog

from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, SampleUsage
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.sampling.claims import ClaimedSample, SampleClaims
from cotrain_store.sampling.token_stream import StreamedTokens, TokenPublisher
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import NewTokens, SampleOutput, SampleRequest, StepResults
from cotrain_workers.engine.ops import Failure, HostWeights
from cotrain_workers.op_codec import sample_request, sample_result
from cotrain_workers.recovery.crashes import CRASHED, MAX_CRASHES, POISON
from cotrain_workers.sampling.token_times import SampleTimes
from cotrain_workers.sampling.vllm.decoder import VllmDecoder

log = structlog.get_logger()

#: Maximum number of pending claimed requests of one tenant: enough to fill the batch of the next
#: steps.
MAX_WAITING = 16
#: Number of pending requests above which each tenant may have only one, so that no tenant waits
#: for others to begin.
MANY_WAITING = 256
#: Maximum number of requests per claim.
MAX_CLAIMED = 256
#: Interval in s of claims while the requests here do not change.
CLAIM_EVERY_S = 0.02
#: Pause of a tenant's next grammar, as a multiple of the processor time that the last one took. All samples wait
#: for a compilation, which may take 0.3 s, so each tenant may use a tenth of the time.
GRAMMAR_PAUSE = 9
#: Processor time in s of a grammar without a pause after it: that of a compiled one that is used again.
FREE_GRAMMAR_S = 0.001
#: Delay in s before results that could not be written (most likely a full disk) are written again.
RETRY_S = 1.0
#: Time constant of the exponential decay in s.
MEMORY_S = 10.0
UNREADABLE = Failure("Internal error: this request could not be read back.", "server")
WEIGHTS_LOST = Failure("The weights of this sampler are lost; save them again.", "server")
REFUSED = (
    "This base model is held by a group of processes, which trains and does not sample: each token would gather all "
    "its weights. Its operator can serve samples from a vLLM server (COTRAIN_SAMPLER=vllm, COTRAIN_VLLM_URL)."
)


class NoDecoder:
    """Decoder of a group without a vLLM server."""

    kv_cache_ratio = None

    def refuse(self, _: SampleRequest) -> str | None:
        """Return why no request can run."""
        return REFUSED

    def add(self, request: SampleRequest) -> None:
        """Raise AssertionError, because `refuse` rejects every request."""
        raise AssertionError(f"{request.id} was refused.")

    def cancel(self, _: str) -> None:
        """Do nothing: no request runs."""

    def step(self) -> StepResults:
        """Return no results."""
        return StepResults()

    @property
    def waiting(self) -> Counter[str]:
        """Return an empty counter."""
        return Counter()

    def drop_weights(self, _: str) -> None:
        """Do nothing: there are no weights."""


#: Generator of tokens for many requests at once. Not thread-safe.
Decoder: TypeAlias = EngineDecoder | VllmDecoder | NoDecoder


class SamplingService:
    """Executor of a worker's share of its pool's sample requests. For one thread.

    A request moves from `_arrived` (claimed) to `_running` (in the decoder) to `_finished` (result not stored yet).
    A request that may break the decoder waits in `_isolated` until it can run alone.
    """

    def __init__(
        self,
        decoder: Decoder,
        make_decoder: Callable[[], Decoder],
        sampling: SampleClaims,
        weights: WeightsStore,
        publisher: TokenPublisher,
        end_of_sequence: Iterable[int],
        metrics: WorkerMetrics,
    ) -> None:
        """`make_decoder` replaces the decoder after a failed step."""
        self._decoder = decoder
        self._make_decoder = make_decoder
        self._sampling = sampling
        self._weights = weights
        self._publisher = publisher
        self._end_of_sequence = frozenset(end_of_sequence)
        self._times = SampleTimes(metrics)
        self._rate = DecodeRate()
        self._running: dict[str, SampleRequest] = {}
        self._isolated: deque[SampleRequest] = deque()
        self._arrived: deque[ClaimedSample] = deque()
        self._finished: dict[RequestId, Result] = {}
        self._streamed: set[str] = set()
        self._uncounted: Counter[str] = Counter()
        self._usage: dict[RequestId, SampleUsage] = {}
        self._grammar_at: dict[TenantId, float] = {}
        """Time of the next grammar of tenants whose last one took long."""
        self._probes: dict[str, SampleOutput | Failure | None] = {}
        """Requests of this process for a check, with their outputs. They have no record in Redis."""
        self._in_doubt = False
        self._answer_at = 0.0
        self._asked_with: Counter[TenantId] = Counter()
        self._ask_at = 0.0
        self.accepts_requests = True
        """False while this worker drains: claimed requests still get results."""
        self.waiting = 0  # number of claimed requests that had not begun after the last step

    @property
    def running(self) -> int:
        """Number of claimed requests without a result. Other threads may read it, and the properties below."""
        return len(self._running) + len(self._isolated) + len(self._arrived)

    @property
    def tokens_per_s(self) -> float:
        """Recent token rate of requests, in tokens of prompts and continuations per s; 0 if unknown."""
        return self._rate.tokens_per_s

    @property
    def kv_cache_ratio(self) -> float | None:
        """Used share of the pages for keys and values; None if another server samples."""
        decoder = getattr(self, "_decoder", None)  # absent while the next one is made
        return decoder.kv_cache_ratio if decoder else 0.0

    def advance(self) -> bool:
        """Run one decode step and the work around it. Return False if there was nothing to decode.

        Raises connection errors. Nothing is lost: the next call continues.
        """
        self._answer()
        self._cancel()
        if not self._running:  # the decoder is then empty
            self._rate.rest()
        self._take()
        worked = bool(self._running) and self._step()
        self.waiting = self._waiting.total() + len(self._isolated)
        self._answer()
        return worked

    def probe(
        self, requests: Sequence[SampleRequest], weights: Mapping[str, HostWeights]
    ) -> Yielding[dict[str, SampleOutput | Failure | None]]:
        """Run requests next to those of clients, with weights of their own, and return their outputs by id; {} without
        the engine's own decoder. It yields after each step. Results of clients are stored as before.

        An output is None if the decoder failed. Raises connection errors.
        """
        if not isinstance(self._decoder, EngineDecoder):
            return {}
        while self._isolated:  # a request that may break the decoder runs alone
            self.advance()
            yield
        self._probes = dict.fromkeys(each.id for each in requests)
        try:
            self._decoder.slots.lent = weights
            for request in requests:
                self._running[request.id] = request
                self._decoder.add(request)
            while not self._probes.keys().isdisjoint(self._running):
                self.advance()
                yield
            return self._probes
        finally:
            for request in requests:
                self._running.pop(request.id, None)
                self._decoder.cancel(request.id)
            self._decoder.slots.lent = {}
            self.forget(weights)
            self._probes = {}

    def drain(self) -> None:
        """Store the finished results, and return the other requests to the queue: this process stops sampling."""
        self._answer()
        for request in self._running:
            self._decoder.cancel(request)
        self._sampling.give_back()

    def forget(self, weights: Iterable[str]) -> None:
        """Drop device copies of weights that no request can use any more."""
        for key in weights:
            self._decoder.drop_weights(key)

    def _take(self) -> None:
        """Keep the decoder supplied. Requests that may break it run one at a time, alone."""
        if not self._isolated:
            self._arrived.extend(self._claim(self._waiting))
        self._admit_arrived()
        if self._isolated and not self._running:
            self._sampling.risk(RequestId(self._isolated[0].id))
            self._begin(self._isolated.popleft())

    @property
    def _waiting(self) -> Counter[TenantId]:
        """Return the number of claimed requests of each tenant that have not begun."""
        arrived = Counter(one.tenant for one in self._arrived)
        if not self._running:
            return arrived
        added = Counter({TenantId(tenant): n for tenant, n in self._decoder.waiting.items()})
        return added + arrived

    def _claim(self, waiting: Counter[TenantId]) -> list[ClaimedSample]:
        """Claim requests, except those that are here already; `waiting` have not begun.

        A claim with a lost answer may have happened, so everything is returned and claimed again.
        """
        if self._finished or not self.accepts_requests:  # the former while results cannot be stored
            return []
        if waiting and waiting == self._asked_with and time.monotonic() < self._ask_at:
            return []
        if self._in_doubt:
            self._sampling.give_back()
        try:
            max_of_tenant = MAX_WAITING if waiting.total() < MANY_WAITING else 1
            claimed = self._sampling.claim(MAX_CLAIMED, max_of_tenant, waiting)
            if claimed:
                failpoint("sample.claimed", (one.request for one in claimed))
        except CONNECTION_LOST:
            self._in_doubt = True
            raise
        self._in_doubt = False
        self._asked_with, self._ask_at = waiting, time.monotonic() + CLAIM_EVERY_S
        here = {*self._running, *(one.id for one in self._isolated), *(one.request for one in self._arrived)}
        return [one for one in claimed if one.request not in here]

    def _admit_arrived(self) -> None:
        """Begin claimed requests, except those whose weights a replay must make first, and those with
        a grammar before its tenant's next one.
        """
        waiting: list[ClaimedSample] = []
        now = time.monotonic()
        self._grammar_at = {tenant: at for tenant, at in self._grammar_at.items() if at > now}
        try:
            while self._arrived:
                claimed = self._arrived[0]
                if self._must_wait(claimed):
                    waiting.append(claimed)
                else:
                    self._admit(claimed)
                self._arrived.popleft()
        finally:  # a lost connection leaves the rest in place
            self._arrived.extend(waiting)

    def _must_wait(self, claimed: ClaimedSample) -> bool:
        ref, body = claimed.weights, claimed.body
        if body is not None and body.grammar is not None and claimed.tenant in self._grammar_at:
            return True
        return bool(ref and self._weights.is_known(ref) and self._weights.is_lost(ref))

    def _admit(self, claimed: ClaimedSample) -> None:
        ref = claimed.weights
        self._times.accept(claimed)
        if claimed.body is None:
            self._finish(claimed.request, UNREADABLE)
        elif claimed.deaths >= MAX_CRASHES:
            self._finish(claimed.request, POISON)
        elif ref and not self._weights.is_known(ref):
            self._finish(claimed.request, WEIGHTS_LOST)
        else:
            request = sample_request(claimed, claimed.body, self._end_of_sequence)
            if claimed.body.stream:
                self._streamed.add(request.id)
            if claimed.starts >= MAX_CRASHES:
                log.warning("request_runs_alone", request=request.id, starts=claimed.starts)
                self._isolated.append(request)
            else:
                self._begin(request)

    def _begin(self, request: SampleRequest) -> None:
        began = time.thread_time()
        reason = self._decoder.refuse(request)
        if request.grammar is not None:
            taken = time.thread_time() - began
            if taken > FREE_GRAMMAR_S:
                until = time.monotonic() + GRAMMAR_PAUSE * taken
                self._grammar_at[TenantId(request.tenant)] = until
        if reason:
            self._finish(request.id, Failure(reason, "user"))
        else:
            self._running[request.id] = request
            self._decoder.add(request)
            self._times.begin(request.id)

    def _step(self) -> bool:
        began = time.monotonic()
        try:
            results = self._decoder.step()
        except Exception:  # the request that caused it is isolated and fails alone
            log.exception("decode_failed", requests=sorted(self._running))
        else:
            ended, tokens = time.monotonic(), results.decoded_tokens + results.prompt_tokens
            self._rate.step(tokens, began, ended)
            of_clients = [new for new in results.tokens if new.request not in self._probes]
            self._times.step(of_clients, ended - began)
            self._note(results, len(results.tokens) - len(of_clients))
            return bool(results.finished or results.decoded_tokens or results.prompt_tokens or results.images)
        # the exception is released only here, with the tensors that its frames hold
        self._isolate_all()
        return True

    def _isolate_all(self) -> None:
        """Restart all requests: one that ran alone fails, several run again one by one."""
        running, self._running = list(self._running.values()), {}
        of_clients = [each for each in running if each.id not in self._probes]
        if len(running) == 1 and of_clients:
            self._finish(running[0].id, CRASHED)
        else:
            self._isolated.extend(of_clients)
        del self._decoder  # its memory must be free before the next one allocates its own
        self._decoder = self._make_decoder()

    def _note(self, results: StepResults, probed: int) -> None:
        """Record the results of a step, of which `probed` tokens are of a check."""
        self._uncounted["sampled_tokens"] += results.decoded_tokens - probed
        self._publish([new for new in results.tokens if new.request in self._streamed])
        for request, output in results.finished:
            self._finish(request, output)

    def _publish(self, tokens: Sequence[NewTokens]) -> None:
        events: dict[str, list[StreamedTokens]] = {}
        for new in tokens:
            event = StreamedTokens(new.sequence, new.offset, new.tokens, new.logprobs)
            events.setdefault(new.request, []).append(event)
        # A client that follows the stream fills a hole from the result.
        with contextlib.suppress(*CONNECTION_LOST):
            for request, of_request in events.items():
                self._publisher.publish(RequestId(request), of_request)

    def _finish(self, request: str, output: SampleOutput | Failure) -> None:
        if request in self._probes:
            self._probes[request] = output
            self._running.pop(request, None)
            return
        if isinstance(output, SampleOutput):
            result = sample_result(self._running[request], output)
            prompt_tokens, cached_tokens = len(self._running[request].prompt), output.cached_prompt_tokens
            self._uncounted["prompt_tokens"] += prompt_tokens
            self._uncounted["cached_prompt_tokens"] += cached_tokens
            sampled_tokens = sum(len(sequence.tokens) for sequence in output.sequences)
            self._usage[RequestId(request)] = SampleUsage(prompt_tokens, cached_tokens, sampled_tokens)
        else:
            result = Result.failed(output.message, output.category)
            reason = output.message if output.category == "server" else None
            log.warning(
                "request_failed", request=request, kind="sample", category=output.category,
                reason=reason,
            )  # fmt: skip
        self._uncounted["sample_requests"] += 1
        self._leave(request)
        self._finished[RequestId(request)] = result

    def _leave(self, request: str) -> None:
        self._running.pop(request, None)
        self._streamed.discard(request)
        self._times.end(request)

    def _cancel(self) -> None:
        """Stop requests that their clients have cancelled."""
        if not self.running:
            return
        for request in self._sampling.cancelled():
            self._decoder.cancel(request)
            self._isolated = deque(one for one in self._isolated if one.id != request)
            self._arrived = deque(one for one in self._arrived if one.request != request)
            self._leave(request)
            self._finished[request] = CANCELLED

    def _answer(self) -> None:
        """Store the pending results. They are kept while Redis is unavailable or the disk is full."""
        if not self._finished or time.monotonic() < self._answer_at:
            return
        failpoint("sample.before_resolve", self._finished)
        try:
            self._sampling.resolve(self._finished, self._uncounted, self._usage)
        except OSError as full:
            log.error("results_not_written", reason=str(full))
            self._answer_at = time.monotonic() + RETRY_S
            return
        failpoint("sample.after_resolve", self._finished)
        self._times.answered(self._finished, self._usage)
        self._finished.clear()
        self._uncounted.clear()
        self._usage.clear()


class DecodeRate:
    """Recent token rate of a decoder."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """Tokens of prompts and continuations per s; 0 before the first step. Any thread may read it."""
        self._tokens = self._seconds = 0.0
        self._since: float | None = None
        """End of the last step, if there was always work since then."""

    def rest(self) -> None:
        """Mark the decoder as idle: the time until the next step is not waiting time."""
        self._since = None

    def step(self, tokens: int, began: float, ended: float) -> None:
        """Count a step, including the time for which its work waited."""
        seconds = ended - (began if self._since is None else self._since)
        self._since = ended
        kept = math.exp(-seconds / MEMORY_S)
        self._tokens, self._seconds = self._tokens * kept + tokens, self._seconds * kept + seconds
        if self._seconds > 0:
            self.tokens_per_s = self._tokens / self._seconds
