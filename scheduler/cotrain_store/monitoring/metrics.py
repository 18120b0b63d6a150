"""Prometheus metrics that each process measures itself; `definitions.py` has their names and descriptions.

An update takes about 1 µs, cheap enough for every request and every cycle. Any thread may update a metric.

* `CountedHistogram` counts equal values at once: a decode step adds one token to hundreds of sequences.
* `TenantLabels` limits the tenant labels of a process to TENANTS_SHOWN.
* `WorkerMetrics` holds the metrics of one worker with its labels.
"""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cotrain_store.blobs.objects import FAILURES
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.messages.ops import OpKind
from cotrain_store.monitoring.definitions import METRICS, Source


class CountedHistogram(Histogram):
    """Histogram of prometheus_client that also counts equal values at once."""

    def observe_times(self, value: float, times: int) -> None:
        """Count a value `times` times."""
        self._sum.inc(value * times)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


REGISTRIES: dict[Source, CollectorRegistry] = {
    source: CollectorRegistry(auto_describe=True) for source in Source if source != Source.FLEET
}


def _counter(name: str) -> Counter:
    metric = METRICS[name]
    return Counter(name, metric.help, metric.labels, registry=REGISTRIES[metric.source])


def _gauge(name: str) -> Gauge:
    metric = METRICS[name]
    return Gauge(name, metric.help, metric.labels, registry=REGISTRIES[metric.source])


def _histogram(name: str) -> CountedHistogram:
    metric = METRICS[name]
    registry, buckets = REGISTRIES[metric.source], metric.buckets or Histogram.DEFAULT_BUCKETS
    return CountedHistogram(name, metric.help, metric.labels, registry=registry, buckets=buckets)


# API
BUILD_INFO = _gauge("cotrain_build_info")
CONNECTIONS_REFUSED = _counter("cotrain_connections_refused_total")
HTTP_DURATION = _histogram("cotrain_http_request_duration_seconds")
HTTP_REQUESTS = _counter("cotrain_http_requests_total")
LONGPOLL_WAITERS = _gauge("cotrain_longpoll_waiters")
REQUESTS_ACCEPTED = _counter("cotrain_requests_accepted_total")
REQUESTS_DUPLICATE = _counter("cotrain_requests_duplicate_total")
REQUESTS_REJECTED = _counter("cotrain_requests_rejected_total")
TENANT_REQUESTS_REFUSED = _counter("cotrain_tenant_requests_refused_total")
WEBHOOK_DELIVERIES = _counter("cotrain_webhook_deliveries_total")
for _limit in ("process", "address", "tenant"):
    CONNECTIONS_REFUSED.labels(_limit)  # shown as 0 before the first

# One for each kind of process that traces
TRACE_SPANS_DROPPED = {
    source: _counter(f"cotrain_{source}_trace_spans_dropped_total")
    for source in (Source.API, Source.SCHEDULER, Source.WORKER)
}

# One for each kind of process that reads and writes blobs
BLOB_FAILURES = {source: _counter(f"cotrain_{source}_blob_failures_total") for source in (Source.API, Source.WORKER)}


def count_blob_failures(source: Source) -> None:
    """Count failed operations of an object store in this process, if it uses one."""
    FAILURES.count = lambda operation: BLOB_FAILURES[source].labels(operation).inc()


# Scheduler
OP_WAIT = _histogram("cotrain_op_wait_seconds")
SCHEDULER_LEADER = _gauge("cotrain_scheduler_leader")
SCHEDULER_TICK = _histogram("cotrain_scheduler_tick_seconds")

# Worker
CYCLE_DURATION = _histogram("cotrain_cycle_duration_seconds")
OP_LATENCY = _histogram("cotrain_op_latency_seconds")
SAMPLE_INTER_TOKEN = _histogram("cotrain_sample_inter_token_seconds")
SAMPLE_QUEUE = _histogram("cotrain_sample_queue_seconds")
SAMPLE_FIRST_TOKEN = _histogram("cotrain_sample_time_to_first_token_seconds")
SNAPSHOT_DURATION = _histogram("cotrain_snapshot_seconds")
TENANT_DEVICE_SECONDS = _counter("cotrain_tenant_device_seconds_total")


#: Number of tenants with their own label. The others share OTHERS, so that a scrape stays small.
TENANTS_SHOWN = 100
OTHERS = "other"


class TenantLabels:
    """Labels of tenants. The first ones keep their label until the process ends, so that counters never decrease."""

    def __init__(self) -> None:
        self._shown: set[TenantId] = set()

    def label(self, tenant: TenantId) -> str:
        """Return a tenant's label."""
        if tenant in self._shown:
            return tenant
        if len(self._shown) >= TENANTS_SHOWN:
            return OTHERS
        self._shown.add(tenant)
        return tenant


_REFUSED_TENANTS = TenantLabels()


def count_refusal(tenant: TenantId, reason: str) -> None:
    """Count a refused request of a tenant."""
    TENANT_REQUESTS_REFUSED.labels(_REFUSED_TENANTS.label(tenant), reason).inc()


class WorkerMetrics:
    """Metrics of one worker with its labels. `pool` is the base model. Thread-safe."""

    def __init__(self, pool: str, worker: WorkerId) -> None:
        self._labels = (pool, worker)
        self._tenants = TenantLabels()
        self._device_seconds: dict[TenantId, Counter] = {}
        self.cycle_duration = CYCLE_DURATION.labels(*self._labels)
        self.snapshot_duration = SNAPSHOT_DURATION.labels(*self._labels)
        self.sample_queue = SAMPLE_QUEUE.labels(*self._labels)
        self.first_token = SAMPLE_FIRST_TOKEN.labels(*self._labels)
        self.inter_token = SAMPLE_INTER_TOKEN.labels(*self._labels)

    def resolved(self, kind: OpKind, latency_s: float) -> None:
        """Count an op that resolved."""
        OP_LATENCY.labels(*self._labels, kind.value).observe(max(0.0, latency_s))

    def used_device(self, tenant: TenantId, seconds: float) -> None:
        """Count the device time in s of a tenant's work."""
        counter = self._device_seconds.get(tenant)
        if counter is None:
            label = self._tenants.label(tenant)
            counter = TENANT_DEVICE_SECONDS.labels(*self._labels, label)
            if label != OTHERS:  # else this would grow with the tenants
                self._device_seconds[tenant] = counter
        counter.inc(seconds)
