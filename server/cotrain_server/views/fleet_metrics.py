"""Prometheus metrics of the fleet and of this API process.

The fleet metrics come from the store and are equal in every API process.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from cotrain_server.services import Services
from cotrain_server.views.server_status import FLEET_TIMEOUT_S, reasons_not_ready
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.definitions import METRICS, POOL_COUNTERS, Kind, Source
from cotrain_store.monitoring.failures import most_failures
from cotrain_store.monitoring.fleet import PoolStatus, QueueStatus, RedisStatus, read_fleet, sum_of
from cotrain_store.monitoring.metrics import OTHERS, TENANTS_SHOWN
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.checkpoints import largest_checkpoint_bytes
from cotrain_store.tenants.policies import largest_run_bytes

#: Default scrape timeout of Prometheus in seconds.
TIMEOUT_S = 10.0


@dataclass(eq=False)  # a registry keeps its collectors by identity
class _Families(Collector):
    """Metric families, built sample by sample for the text format."""

    by_name: dict[str, Metric] = field(default_factory=dict)

    def add(self, name: str, value: float, **labels: str) -> None:
        metric = METRICS[name]
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = self.by_name.setdefault(name, kind(name, metric.help, labels=metric.labels))
        assert isinstance(family, kind)
        family.add_metric([labels[label] for label in metric.labels], value)

    @override
    def collect(self) -> Iterable[Metric]:
        return self.by_name.values()


async def fleet_metrics(services: Services) -> bytes:
    """Return the fleet metrics in Prometheus text format. An unavailable Redis is one of the metrics."""
    families = _Families()
    settings = services.settings
    disk = shutil.disk_usage(settings.data_dir)
    families.add("cotrain_disk_free_bytes", disk.free)
    families.add("cotrain_disk_total_bytes", disk.total)
    families.add("cotrain_disk_reserve_bytes", settings.disk_reserve_bytes)
    try:
        async with asyncio.timeout(FLEET_TIMEOUT_S):
            fleet = await read_fleet(services.connection)
            run_bytes = await largest_run_bytes(services.connection, TENANTS_SHOWN)
            failures = await most_failures(services.connection, TENANTS_SHOWN)
            checkpoints = await largest_checkpoint_bytes(services.connection, TENANTS_SHOWN)
    except (TimeoutError, *CONNECTION_LOST):
        families.add("cotrain_redis_up", 0)
        families.add("cotrain_ready", 0)
    else:
        families.add("cotrain_ready", not reasons_not_ready(services, fleet))
        _add_redis(families, fleet.redis)
        for tenant, size in run_bytes.items():
            families.add("cotrain_run_bytes", size, tenant=tenant)
        for tenant, size in checkpoints.items():
            families.add("cotrain_checkpoint_bytes", size, tenant=tenant)
        for pool in fleet.pools:
            _add_pool(families, pool)
            of = {"pool": pool.record.base_model}
            for tenant, count in failures.get(pool.record.id, ()):
                families.add("cotrain_tenant_requests_failed_total", count, tenant=tenant, **of)
        # Its first worker measures the limits for validating requests.
        for base_model in fleet.unserved(settings.base_models):
            families.add("cotrain_pool_workers_wanted", 1, pool=base_model)
    registry = CollectorRegistry()
    registry.register(families)
    return generate_latest(registry)


def _add_redis(families: _Families, redis: RedisStatus) -> None:
    families.add("cotrain_redis_up", 1)
    families.add("cotrain_redis_aof_last_write_ok", redis.aof_last_write_ok)
    families.add("cotrain_redis_memory_bytes", redis.memory_bytes)
    families.add("cotrain_redis_memory_limit_bytes", redis.memory_limit_bytes)
    limit = redis.memory_limit_bytes
    families.add("cotrain_redis_memory_ratio", redis.memory_bytes / limit if limit else 0)
    families.add("cotrain_oplog_bytes", redis.aof_bytes)


def _add_pool(families: _Families, status: PoolStatus) -> None:
    pool, now = status.record.base_model, time.time()
    for name, metric in POOL_COUNTERS.items():
        families.add(metric.name, status.counters.get(name, 0.0), pool=pool)
    for state, count in _runs_by_state(status.counters).items():
        families.add("cotrain_runs", count, pool=pool, state=state)
    families.add("cotrain_queue_oldest_seconds", status.oldest_ready_s, pool=pool)
    families.add("cotrain_seq_gap_seconds_max", status.oldest_gap_s, pool=pool)
    families.add("cotrain_saved_weights", status.weights, pool=pool)
    families.add("cotrain_open_cycles", status.open_cycles, pool=pool)
    families.add("cotrain_pool_backlog_seconds", status.backlog_s, pool=pool)
    families.add("cotrain_pool_workers_wanted", status.workers_wanted(now), pool=pool)
    for worker in status.workers:
        _add_worker(families, pool, worker)
    for missing in status.workers_missing(now):
        families.add("cotrain_worker_up", 0, pool=pool, worker=missing)
    for queue in top_tenants(status.queues):
        of = {"pool": pool, "tenant": queue.tenant}
        families.add("cotrain_queue_ops", queue.ops, **of)
        families.add("cotrain_queue_tokens", queue.tokens, **of)
        families.add("cotrain_samples_waiting", queue.samples_waiting, **of)
        families.add("cotrain_samples_running", queue.samples_running, **of)


def _add_worker(families: _Families, pool: str, worker: WorkerHeartbeat) -> None:
    of = {"pool": pool, "worker": worker.id}
    families.add("cotrain_worker_up", 1, **of)
    families.add("cotrain_worker_epoch", worker.epoch, **of)
    families.add("cotrain_worker_memory_bytes", worker.memory_bytes, **of)
    families.add("cotrain_worker_device_memory_bytes", worker.device_memory_bytes, **of)
    families.add("cotrain_worker_device_memory_limit_bytes", worker.device_memory_limit_bytes, **of)
    families.add("cotrain_worker_tokens_per_second", worker.tokens_per_s, **of)
    families.add("cotrain_worker_safe_tokens", worker.safe_tokens, **of)
    families.add("cotrain_worker_halvings_total", worker.halvings, **of)
    families.add("cotrain_worker_lora_fell_back", bool(worker.lora_fallback), **of)
    families.add("cotrain_worker_restored_ops_total", worker.restored_ops, **of)
    left = worker.restoring or {"ops": 0, "ops_done": 0}
    families.add("cotrain_worker_restoring_ops", left["ops"] - left["ops_done"], **of)
    families.add("cotrain_worker_takes_saves", worker.accepts_saves, **of)
    families.add("cotrain_worker_samples_running", worker.samples_running, **of)
    families.add("cotrain_worker_samples_waiting", worker.samples_waiting, **of)
    families.add("cotrain_owed_save_bytes", worker.unstored_bytes, **of)
    families.add("cotrain_snapshot_age_seconds_max", worker.snapshot_age_s, **of)
    families.add("cotrain_snapshot_due_seconds", worker.snapshot_due_s, **of)
    if worker.self_check:
        families.add("cotrain_worker_self_check_ok", worker.self_check["ok"], **of)
        for kind in ("logprobs", "gradients", "weights", "samples"):
            difference = worker.self_check.get(kind)
            if difference is None:  # another server samples, or an earlier version checked
                continue
            families.add("cotrain_worker_self_check_difference", difference, kind=kind, **of)
    if worker.kv_cache_ratio is not None:
        families.add("cotrain_kv_cache_usage_ratio", worker.kv_cache_ratio, **of)
    for phase, seconds in worker.device_seconds.items():
        families.add("cotrain_device_seconds_total", seconds, phase=phase, **of)
    for tier, count in worker.adapters.items():
        families.add("cotrain_adapters", count, tier=tier, **of)
    for tier, size in worker.adapter_bytes.items():
        families.add("cotrain_adapter_bytes", size, tier=tier, **of)


def _runs_by_state(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the number of runs by state. Runs created before runs were counted are excluded."""
    closed, failed = counters.get("runs_closed", 0.0), counters.get("runs_failed", 0.0)
    live = max(0.0, counters.get("runs_made", 0.0) - closed - failed)
    return {"live": live, "closed": closed, "failed": failed}


def top_tenants(queues: Sequence[QueueStatus]) -> list[QueueStatus]:
    """Return the busiest tenants, and the sum of all others."""
    ranked = sorted(queues, key=_load, reverse=True)
    rest = ranked[TENANTS_SHOWN:]
    return ranked[:TENANTS_SHOWN] + ([sum_of(rest, OTHERS)] if rest else [])


def _load(queue: QueueStatus) -> tuple[int, ...]:
    return queue.tokens, queue.ops, queue.samples_waiting + queue.samples_running


def process_metrics(services: Services) -> bytes:
    """Return the metrics of this process in Prometheus text format."""
    metrics.LONGPOLL_WAITERS.set(services.futures.waiters)
    return generate_latest(metrics.REGISTRIES[Source.API])


def metrics_pages(services: Services) -> Mapping[str, Callable[[], bytes]]:
    """Return the metrics pages, which another thread may call while this event loop runs."""
    loop = asyncio.get_running_loop()

    def fleet() -> bytes:
        page = asyncio.run_coroutine_threadsafe(fleet_metrics(services), loop)
        return page.result(TIMEOUT_S)

    return {"/metrics": partial(process_metrics, services), "/metrics/fleet": fleet}
