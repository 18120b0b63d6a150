"""Times of sample requests: waits, intervals of tokens, spans, and device time by tenant.

A step yields hundreds of tokens, most of them at equal intervals; equal ones are counted at once.

The spans of a traced request extend from acceptance to result, with the wait for the decoder and the decoding inside.
They are made from recorded times once a result is stored. A worker that crashes leaves none, and the process that runs
a request again reports it as its own.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, ResultKind, SampleUsage
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.monitoring.traces import record, tracer
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import NewTokens


@dataclass
class _Times:
    """Times of one request, in s since 1970."""

    claimed: ClaimedSample
    began: float | None = None  # None before the decoding
    ended: float | None = None  # None until the end of the decoding
    last: dict[int, float] = field(default_factory=dict)  # monotonic time of the last token by sequence


class SampleTimes:
    """Metrics of a decoder's steps, and spans of traced requests. For one thread."""

    def __init__(
        self, metrics: WorkerMetrics, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._wall = wall
        self._clock = clock
        self._open: dict[str, _Times] = {}
        self._traced: dict[str, _Times] = {}
        """Traced requests without a stored result."""

    def accept(self, claimed: ClaimedSample) -> None:
        """Add a claimed request."""
        times = self._open[claimed.request] = _Times(claimed)
        if claimed.trace and tracer():
            self._traced[claimed.request] = times

    def begin(self, request: str) -> None:
        """Record the start of decoding. The spans of a request that starts again begin at its first start."""
        times = self._open[request]
        self._metrics.sample_queue.observe(self._since(times.claimed.accepted_at))
        times.began = times.began or self._wall()

    def step(self, tokens: Sequence[NewTokens], seconds: float) -> None:
        """Count a step: its tokens, and its time, which is shared among tenants by tokens.

        A step without tokens computed prompts: its time is shared equally among all requests.
        """
        now = self._clock()
        gaps: defaultdict[float, int] = defaultdict(int)
        given: defaultdict[TenantId, int] = defaultdict(int)
        for new in tokens:
            times = self._open[new.request]
            last = times.last.get(new.sequence)
            if last is not None:
                gaps[(now - last) / len(new.tokens)] += len(new.tokens)
            elif not times.last:
                self._metrics.first_token.observe(self._since(times.claimed.accepted_at))
            times.last[new.sequence] = now
            given[times.claimed.tenant] += len(new.tokens)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe_times(gap, count)
        shares = given or Counter(times.claimed.tenant for times in self._open.values())
        in_all = sum(shares.values())
        for tenant, share in shares.items():
            self._metrics.used_device(tenant, seconds * share / in_all)

    def end(self, request: str) -> None:
        """Record the end of decoding; the result is not stored yet."""
        if times := self._open.pop(request, None):
            times.ended = self._wall()

    def answered(self, results: Mapping[RequestId, Result], usage: Mapping[RequestId, SampleUsage]) -> None:
        """Report traced requests whose results are now stored."""
        for request, result in results.items():
            if times := self._traced.pop(request, None):
                _report(times, result, usage.get(request))

    def _since(self, accepted_at: float) -> float:
        return max(0.0, self._wall() - accepted_at)  # clocks of two hosts may differ


def _report(times: _Times, result: Result, used: SampleUsage | None) -> None:
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
