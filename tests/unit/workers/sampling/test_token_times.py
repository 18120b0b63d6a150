"""Times of tokens, and the device time that each tenant uses in a decode step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cotrain_store.messages.ids import RequestId, SamplerId, TenantId, WorkerId
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import REGISTRIES, WorkerMetrics
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import NewTokens
from cotrain_workers.sampling.token_times import SampleTimes

A, B = TenantId("a"), TenantId("b")


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Return token times on a simulated clock, with a reader of the metrics."""
    worker = request.node.name
    clock = SimpleNamespace(now=1000.0)
    metrics = WorkerMetrics("pool", WorkerId(worker))
    times = SampleTimes(metrics, wall=lambda: clock.now, clock=lambda: clock.now)

    def counted(name: str, **labels: str) -> float:
        labels |= {"pool": "pool", "worker": worker}
        return REGISTRIES[Source.WORKER].get_sample_value(f"cotrain_{name}", labels) or 0.0

    return SimpleNamespace(clock=clock, times=times, counted=counted)


def claimed(request: str, tenant: TenantId, accepted_at: float) -> ClaimedSample:
    return ClaimedSample(RequestId(request), tenant, SamplerId("s"), None, None, accepted_at, starts=0, deaths=0)


def new(request: str, sequence: int = 0, count: int = 1) -> NewTokens:
    return NewTokens(request, sequence, 0, (1,) * count, (0.0,) * count)


def test_queue_time_first_token_and_inter_token_times_are_counted(bench: Any) -> None:
    times, clock, counted = bench.times, bench.clock, bench.counted
    times.accept(claimed("r", A, 998.0))
    times.begin("r")
    clock.now = 1001
    times.step([new("r", 0), new("r", 1)], 0.5)
    clock.now = 1003
    times.step([new("r", 0), new("r", 1)], 0.5)
    clock.now = 1004
    times.step([new("r", 0)], 0.5)
    assert counted("sample_queue_seconds_sum") == 2
    assert counted("sample_time_to_first_token_seconds_sum") == 3
    assert counted("sample_time_to_first_token_seconds_count") == 1
    assert counted("sample_inter_token_seconds_count") == 3
    assert counted("sample_inter_token_seconds_sum") == 5
    assert counted("sample_inter_token_seconds_bucket", le="1.0") == 1


def test_the_time_of_a_step_is_divided_among_tenants_by_tokens(bench: Any) -> None:
    times, counted = bench.times, bench.counted
    for request, tenant in (("r", A), ("s", B)):
        times.accept(claimed(request, tenant, 999.0))
        times.begin(request)
    times.step([], 2.0)
    times.step([new("r", 0), new("r", 1), new("r", 2), new("s")], 4.0)
    assert counted("tenant_device_seconds_total", tenant="a") == pytest.approx(1 + 3)
    assert counted("tenant_device_seconds_total", tenant="b") == pytest.approx(1 + 1)
    times.end("s")
    times.step([], 1.0)
    assert counted("tenant_device_seconds_total", tenant="a") == pytest.approx(5)


def test_a_finished_request_leaves_no_state(bench: Any) -> None:
    times = cast("SampleTimes", bench.times)
    times.accept(claimed("r", A, 999.0))
    times.begin("r")
    times.step([new("r")], 1.0)
    times.end("r")
    times.step([], 1.0)
    assert not times._open
