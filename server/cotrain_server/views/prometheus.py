"""Prometheus metrics: of this process, and what is read from the store, the same by every API process."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from cotrain_server.views.readiness import LOOK_TIMEOUT_S
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.status import QueueStatus, pool_status, redis_status
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.run_bytes import largest_run_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

    from cotrain_server.services import Services
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.monitoring.status import PoolStatus, RedisStatus

#: Tenants with a line of their own; the others are summed up, so that a scrape stays small.
TENANTS_SHOWN = 100
OTHERS = TenantId("other")


@dataclass(eq=False)  # a registry keeps its collectors by identity
class _Families(Collector):
    """Families built sample by sample, then handed to the text format."""

    by_name: dict[str, Metric] = field(default_factory=dict)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        family = self.by_name.setdefault(name, GaugeMetricFamily(name, text, labels=[*labels]))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric([*labels.values()], value)

    def count(self, name: str, text: str, value: float, **labels: str) -> None:
        family = self.by_name.setdefault(name, CounterMetricFamily(name, text, labels=[*labels]))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric([*labels.values()], value)

    @override
    def collect(self) -> Iterable[Metric]:
        return self.by_name.values()


def process_metrics(services: Services) -> bytes:
    """Write what this process counts in the Prometheus text format."""
    metrics.LONGPOLL_WAITERS.set(services.futures.waiters)
    return generate_latest(metrics.REGISTRY)


async def store_metrics(services: Services) -> bytes:
    """Write what the store knows of all processes; a Redis that is unavailable is one of the metrics."""
    found = _Families()
    free_bytes = shutil.disk_usage(services.settings.data_dir).free
    found.gauge("cotrain_disk_free_bytes", "Free space under the data folder.", free_bytes)
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            redis = await redis_status(services.connection)
            run_bytes = await largest_run_bytes(services.connection, TENANTS_SHOWN)
            pools = [
                (pool, await pool_status(services.connection, pool.id))
                for pool in await services.records.pools()
            ]
    except (TimeoutError, *CONNECTION_LOST):
        found.gauge("cotrain_redis_up", "Whether Redis answers.", 0)
    else:
        _add_redis(found, redis)
        for tenant, size in run_bytes.items():
            text = "What live runs hold in memory and on disk, of those tenants that hold the most."
            found.gauge("cotrain_run_bytes", text, size, tenant=tenant)
        for pool, status in pools:
            _add_pool(found, pool, status)
    registry = CollectorRegistry()
    registry.register(found)
    return generate_latest(registry)


def _add_redis(found: _Families, redis: RedisStatus) -> None:
    found.gauge("cotrain_redis_up", "Whether Redis answers.", 1)
    found.gauge(
        "cotrain_redis_aof_last_write_ok",
        "Whether Redis could write its log.",
        float(redis.aof_last_write_ok),
    )
    found.gauge("cotrain_redis_memory_bytes", "Memory Redis uses.", redis.memory_bytes)
    text = "Memory Redis may use; 0: as much as there is."
    found.gauge("cotrain_redis_memory_limit_bytes", text, redis.memory_limit_bytes)
    found.gauge("cotrain_oplog_bytes", "Size of the append-only file.", redis.aof_bytes)


def _add_pool(found: _Families, record: PoolRecord, status: PoolStatus) -> None:
    pool = record.base_model
    for name, (metric, text) in metrics.POOL_COUNTERS.items():
        found.count(metric, text, status.counters.get(name, 0.0), pool=pool)
    found.gauge(
        "cotrain_queue_oldest_seconds", "Age of the oldest op.", status.oldest_ready_s, pool=pool
    )
    found.gauge(
        "cotrain_seq_gap_seconds_max", "Age of the oldest gap.", status.oldest_gap_s, pool=pool
    )
    found.gauge("cotrain_saved_weights", "Saved weights on record.", status.weights, pool=pool)
    found.gauge("cotrain_open_cycles", "Planned, not committed.", status.open_cycles, pool=pool)
    for worker in status.workers:
        labels = {"pool": pool, "worker": worker.id}
        found.gauge(
            "cotrain_worker_up", "1 for a live worker, 0 for one that is unavailable.", 1, **labels
        )
        found.gauge("cotrain_worker_epoch", "Starts of this worker.", worker.epoch, **labels)
        found.gauge("cotrain_adapters_resident", "Adapters held.", worker.runs, **labels)
        found.gauge(
            "cotrain_adapters_parked",
            "Of those, on the host and not on the device.",
            worker.parked_runs,
            **labels,
        )
        found.gauge("cotrain_worker_memory_bytes", "Memory used.", worker.memory_bytes, **labels)
    for missing in status.workers_unavailable:
        found.gauge(
            "cotrain_worker_up",
            "1 for a live worker, 0 for one that is unavailable.",
            0,
            pool=pool,
            worker=missing,
        )
    for queue in top_tenants(status.queues):
        labels = {"pool": pool, "tenant": queue.tenant}
        found.gauge("cotrain_queue_ops", "Ops accepted, not committed.", queue.ops, **labels)
        found.gauge("cotrain_queue_tokens", "Tokens accepted, not run.", queue.tokens, **labels)
        waiting, running = queue.samples_waiting, queue.samples_running
        found.gauge("cotrain_samples_waiting", "Samples that wait for a worker.", waiting, **labels)
        found.gauge("cotrain_samples_running", "Samples a worker runs.", running, **labels)


def top_tenants(queues: Sequence[QueueStatus]) -> list[QueueStatus]:
    """Keep the busiest tenants and sum up the rest."""
    ranked = sorted(queues, key=_load, reverse=True)
    rest = ranked[TENANTS_SHOWN:]
    return ranked[:TENANTS_SHOWN] + ([_sum(rest)] if rest else [])


def _load(queue: QueueStatus) -> tuple[int, ...]:
    return queue.tokens, queue.ops, queue.samples_waiting + queue.samples_running


def _sum(queues: Sequence[QueueStatus]) -> QueueStatus:
    return QueueStatus(
        OTHERS,
        ops=sum(queue.ops for queue in queues),
        tokens=sum(queue.tokens for queue in queues),
        bytes=sum(queue.bytes for queue in queues),
        samples_waiting=sum(queue.samples_waiting for queue in queues),
        samples_running=sum(queue.samples_running for queue in queues),
    )
