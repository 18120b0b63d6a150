"""What each process counts itself, as prometheus_client's objects; what they are called is in `definitions.py`.

Cheap enough for every request and every cycle (about a microsecond each), and safe from any thread.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cotrain_store.blobs.failures import FAILURES
from cotrain_store.monitoring.counted_histogram import CountedHistogram
from cotrain_store.monitoring.definitions import METRICS, Metric, Source

REGISTRIES: dict[Source, CollectorRegistry] = {
    source: CollectorRegistry(auto_describe=True) for source in Source if source != Source.FLEET
}


def _counter(name: str) -> Counter:
    metric = METRICS[name]
    return Counter(name, metric.help, metric.labels, registry=REGISTRIES[metric.source])


def _gauge(name: str) -> Gauge:
    metric = METRICS[name]
    return Gauge(name, metric.help, metric.labels, registry=REGISTRIES[metric.source])


def _histogram(name: str) -> Histogram:
    metric = METRICS[name]
    return Histogram(
        name, metric.help, metric.labels, registry=REGISTRIES[metric.source], buckets=_buckets(metric)
    )  # fmt: skip


def _buckets(metric: Metric) -> tuple[float, ...]:
    return metric.buckets or Histogram.DEFAULT_BUCKETS


# API
BUILD_INFO = _gauge("cotrain_build_info")
CONNECTIONS_REFUSED = _counter("cotrain_connections_refused_total")
HTTP_DURATION = _histogram("cotrain_http_request_duration_seconds")
HTTP_REQUESTS = _counter("cotrain_http_requests_total")
LONGPOLL_WAITERS = _gauge("cotrain_longpoll_waiters")
REQUESTS_ACCEPTED = _counter("cotrain_requests_accepted_total")
REQUESTS_DUPLICATE = _counter("cotrain_requests_duplicate_total")
REQUESTS_REJECTED = _counter("cotrain_requests_rejected_total")
WEBHOOK_DELIVERIES = _counter("cotrain_webhook_deliveries_total")
for _limit in ("process", "address", "tenant"):
    CONNECTIONS_REFUSED.labels(_limit)  # shown as 0 before the first

# Of each process that traces, its own
TRACE_SPANS_DROPPED = {
    source: _counter(f"cotrain_{source}_trace_spans_dropped_total")
    for source in (Source.API, Source.SCHEDULER, Source.WORKER)
}

# Of each process that reads and writes blobs, its own
BLOB_FAILURES = {
    source: _counter(f"cotrain_{source}_blob_failures_total")
    for source in (Source.API, Source.WORKER)
}


def count_blob_failures(source: Source) -> None:
    """Have this process count what an object store refuses; nothing to count where there is none."""
    FAILURES.count = lambda operation: BLOB_FAILURES[source].labels(operation).inc()


# Scheduler
OP_WAIT = _histogram("cotrain_op_wait_seconds")
SCHEDULER_LEADER = _gauge("cotrain_scheduler_leader")
SCHEDULER_TICK = _histogram("cotrain_scheduler_tick_seconds")

# Worker
CYCLE_DURATION = _histogram("cotrain_cycle_duration_seconds")
OP_LATENCY = _histogram("cotrain_op_latency_seconds")
SAMPLE_INTER_TOKEN = CountedHistogram(
    METRICS["cotrain_sample_inter_token_seconds"], REGISTRIES[Source.WORKER]
)
SAMPLE_QUEUE = _histogram("cotrain_sample_queue_seconds")
SAMPLE_FIRST_TOKEN = _histogram("cotrain_sample_time_to_first_token_seconds")
SNAPSHOT_DURATION = _histogram("cotrain_snapshot_seconds")
TENANT_DEVICE_SECONDS = _counter("cotrain_tenant_device_seconds_total")
