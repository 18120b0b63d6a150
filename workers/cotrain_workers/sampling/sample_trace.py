"""The spans of sample requests: from acceptance to answer, and in it the wait for the decoder and the decoding.

They are made of times that were noted, once an answer is stored. A worker that dies leaves none, and the process
that runs a request again reports it as its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.messages.results import ResultKind
from cotrain_store.monitoring.tracing import tracer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import RequestId
    from cotrain_store.messages.results import Result
    from cotrain_store.messages.samples import SampleUsage
    from cotrain_store.sampling.claims import ClaimedSample


@dataclass
class _Times:
    """Of one traced request, by the wall clock."""

    claimed: ClaimedSample
    began: float | None = None
    ended: float | None = None


class SampleTraces:
    """Notes when traced requests begin and end, and reports them. For one thread."""

    def __init__(self) -> None:
        self._open: dict[str, _Times] = {}

    def claim(self, claimed: ClaimedSample) -> None:
        """Take a request that was claimed; one that is not traced costs this look."""
        if claimed.trace and tracer():
            self._open[claimed.request] = _Times(claimed)

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


def _report(times: _Times, result: Result, used: SampleUsage | None) -> None:
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
