"""Times of sample requests: waits, intervals of tokens, spans, and device time by tenant.

A step yields hundreds of tokens, most of them at equal intervals; equal ones are counted at once.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, ResultKind, SampleUsage
from cotrain_store.monitoring.logs_and_traces import record, tracer
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import NewTokens


class TokenTimes:
    """Metrics of a decoder's steps. For one thread."""

    def __init__(
        self, metrics: WorkerMetrics, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._wall = wall
        self._clock = clock
        self._requests: dict[str, _Times] = {}

    def accept(self, request: str, tenant: TenantId, accepted_at: float) -> None:
        """Add a claimed request."""
        self._requests[request] = _Times(tenant, accepted_at)

    def begin(self, request: str) -> None:
        """Record the start of decoding."""
        self._metrics.sample_queue.observe(self._since(self._requests[request].accepted_at))

    def step(self, tokens: Sequence[NewTokens], seconds: float) -> None:
        """Count a step: its tokens, and its time, which is shared among tenants by tokens.

        A step without tokens computed prompts: its time is shared equally among all requests.
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
            self._metrics.inter_token.observe_times(gap, count)
        shares = given or Counter(times.tenant for times in self._requests.values())
        in_all = sum(shares.values())
        for tenant, share in shares.items():
            self._metrics.used_device(tenant, seconds * share / in_all)

    def end(self, request: str) -> None:
        """Remove a request."""
        self._requests.pop(request, None)

    def _since(self, accepted_at: float) -> float:
        return max(0.0, self._wall() - accepted_at)  # clocks of two hosts may differ


@dataclass
class _Times:
    """Times of one request."""

    tenant: TenantId
    accepted_at: float
    last: dict[int, float] = field(default_factory=dict)  # time of the last token by sequence


class SampleTraces:
    """Recorder of the start and end of traced requests. For one thread.

    It records the spans of sample requests: from acceptance to result, with the wait for the decoder and the
    decoding inside. The spans are made from recorded times once a result is stored. A worker that crashes leaves
    none, and the process that runs a request again reports it as its own.
    """

    def __init__(self) -> None:
        self._open: dict[str, _TracedTimes] = {}

    def claim(self, claimed: ClaimedSample) -> None:
        """Add a claimed request, if it is traced."""
        if claimed.trace and tracer():
            self._open[claimed.request] = _TracedTimes(claimed)

    def begin(self, request: str) -> None:
        """Record the start of decoding, unless a previous run has started."""
        if (times := self._open.get(request)) and times.began is None:
            times.began = time.time()

    def end(self, request: str) -> None:
        """Record the end of decoding; the result is not stored yet."""
        if times := self._open.get(request):
            times.ended = time.time()

    def answered(self, results: Mapping[RequestId, Result], usage: Mapping[RequestId, SampleUsage]) -> None:
        """Report requests whose results are now stored."""
        for request, result in results.items():
            if times := self._open.pop(request, None):
                _report(times, result, usage.get(request))


@dataclass
class _TracedTimes:
    """Wall-clock times of one traced request."""

    claimed: ClaimedSample
    began: float | None = None
    ended: float | None = None


def _report(times: _TracedTimes, result: Result, used: SampleUsage | None) -> None:
    """Report names and numbers of a request. They contain nothing that its tenant wrote."""
    traces, claimed, now = tracer(), times.claimed, time.time()
    if traces is None:
        return
    is_failed = result.kind is ResultKind.FAILURE
    accepted = min(claimed.accepted_at, now)  # clocks of two hosts may differ
    ended = times.ended or now
    began = min(max(times.began or ended, accepted), ended)
    sample = record(
        traces, "sample", accepted, now, claimed.trace, failed=is_failed,
        request=claimed.request, tenant=claimed.tenant, sampler=claimed.sampler, waited_s=began - accepted,
        crashes=claimed.starts, failure=result.json()["category"] if is_failed else None,
    )  # fmt: skip
    record(traces, "queue", accepted, began, sample)
    if times.began is not None:
        record(
            traces, "decode", began, ended, sample,
            prompt_tokens=used.prompt_tokens if used else None,
            cached_tokens=used.cached_tokens if used else None,
            sampled_tokens=used.sampled_tokens if used else None,
        )  # fmt: skip
