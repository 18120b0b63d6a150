"""How long sample requests waited, when their tokens came, and whose the device's time was while they did.

A step gives hundreds of sequences a token each, most of them as long after the one before: such are counted at once.

The spans of sample requests: from acceptance to answer, and in it the wait for the decoder and the decoding.

They are made of times that were noted, once an answer is stored. A worker that dies leaves none, and the process
that runs a request again reports it as its own.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.samples import SampleUsage
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.monitoring.tracing import tracer
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import NewTokens


@dataclass
class _Times:
    """Of one request."""

    tenant: TenantId
    accepted_at: float
    last: dict[int, float] = field(default_factory=dict)
    """Sequence → when its last token came."""


class TokenTimes:
    """Counts what a decoder's steps show. For one thread."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._wall = wall
        self._clock = clock
        self._requests: dict[str, _Times] = {}

    def accept(self, request: str, tenant: TenantId, accepted_at: float) -> None:
        """Take a request that was claimed."""
        self._requests[request] = _Times(tenant, accepted_at)

    def begin(self, request: str) -> None:
        """Note that it goes to the decoder."""
        self._metrics.sample_queue.observe(self._since(self._requests[request].accepted_at))

    def step(self, tokens: Sequence[NewTokens], seconds: float) -> None:
        """Count a step: the tokens it gave, and its time, which is its tenants' by their tokens.

        A step without tokens computed prompts: its time is shared among all requests alike.
        """
        now = self._clock()
        gaps: defaultdict[float, int] = defaultdict(int)
        given: defaultdict[TenantId, int] = defaultdict(int)
        for new in tokens:
            times = self._requests[new.request]
            last = times.last.get(new.sequence)
            if last is not None:
                gaps[(now - last) / len(new.tokens)] += len(new.tokens)
            elif not times.last:
                self._metrics.first_token.observe(self._since(times.accepted_at))
            times.last[new.sequence] = now
            given[times.tenant] += len(new.tokens)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)
        shares = given or Counter(times.tenant for times in self._requests.values())
        in_all = sum(shares.values())
        for tenant, share in shares.items():
            self._metrics.used_device(tenant, seconds * share / in_all)

    def end(self, request: str) -> None:
        """Forget a request."""
        self._requests.pop(request, None)

    def _since(self, accepted_at: float) -> float:
        return max(0.0, self._wall() - accepted_at)  # clocks of two hosts may differ


@dataclass
class _TracedTimes:
    """Of one traced request, by the wall clock."""

    claimed: ClaimedSample
    began: float | None = None
    ended: float | None = None


class SampleTraces:
    """Notes when traced requests begin and end, and reports them. For one thread."""

    def __init__(self) -> None:
        self._open: dict[str, _TracedTimes] = {}

    def claim(self, claimed: ClaimedSample) -> None:
        """Take a request that was claimed; one that is not traced costs this look."""
        if claimed.trace and tracer():
            self._open[claimed.request] = _TracedTimes(claimed)

    def begin(self, request: str) -> None:
        """Note that it goes to the decoder; one that runs again has begun before."""
        if (times := self._open.get(request)) and times.began is None:
            times.began = time.time()

    def end(self, request: str) -> None:
        """Note that it has its answer, which is not stored yet."""
        if times := self._open.get(request):
            times.ended = time.time()

    def answered(
        self, results: Mapping[RequestId, Result], usage: Mapping[RequestId, SampleUsage]
    ) -> None:
        """Report requests whose results are stored now."""
        for request, result in results.items():
            if times := self._open.pop(request, None):
                _report(times, result, usage.get(request))


def _report(times: _TracedTimes, result: Result, used: SampleUsage | None) -> None:
    """Describe a request by names and numbers: nothing that its tenant wrote is in them."""
    traces, claimed, now = tracer(), times.claimed, time.time()
    if traces is None:
        return
    is_failed = result.kind is ResultKind.FAILURE
    accepted = min(claimed.accepted_at, now)  # clocks of two hosts may differ
    ended = times.ended or now
    began = min(max(times.began or ended, accepted), ended)
    sample = traces.record(
        "sample", accepted, now, claimed.trace, failed=is_failed,
        request=claimed.request, tenant=claimed.tenant, sampler=claimed.sampler, waited_s=began - accepted,
        crashes=claimed.starts, failure=result.json()["category"] if is_failed else None,
    )  # fmt: skip
    traces.record("queue", accepted, began, sample)
    if times.began is not None:
        traces.record(
            "decode", began, ended, sample,
            prompt_tokens=used.prompt_tokens if used else None,
            cached_tokens=used.cached_tokens if used else None,
            sampled_tokens=used.sampled_tokens if used else None,
        )  # fmt: skip
