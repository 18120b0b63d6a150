"""State of the server: readiness, `/status`, `/fleet` and the list of workers, each from one read of the fleet.

The operator receives everything, a tenant its own part.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cotrain.version import __version__
from cotrain.wire.admin import FleetPool, FleetWorker, Restoring, WorkerShown
from cotrain_server.probe import read_problems
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.messages.fleet import WorkerHeartbeat, restoring_text
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.fleet import (
    Fleet,
    PoolStatus,
    WorkerStatus,
    backlog_seconds,
    read_fleet,
    read_pools,
    sum_of,
)
from cotrain_store.monitoring.metrics import TENANTS_SHOWN
from cotrain_store.monitoring.recent_activity import cycle_records
from cotrain_store.redis_client.clients import REFUSALS
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.results.delivery_log import largest_unread_bytes, unread_bytes
from cotrain_store.tenants.catalog import tenant_names
from cotrain_store.tenants.policies import largest_run_bytes, run_bytes

REDIS_TIMEOUT_S = 1.0
#: Time limit of a page or a metrics response that reads the fleet. Prometheus gives up after 10 s.
FLEET_TIMEOUT_S = 5.0
CYCLES_SHOWN = 20
_STARTED_AT = time.time()


@dataclass(frozen=True)
class Readiness:
    """Answer of `/readyz`, in sentences for an operator."""

    reasons: list[str]
    """Reasons that prevent training; empty if ready."""
    restoring: list[str]
    """One sentence for each worker that restores runs, whose requests wait."""


async def readiness(services: Services) -> Readiness:
    """Return the readiness of the server. It reads no queues, so its cost does not grow with tenants."""
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            fleet = await read_fleet(services.connection, with_queues=False)
    except REFUSALS as refused:
        return Readiness(_reasons(services, [f"Redis takes nothing for now: {refused}"]), [])
    except (TimeoutError, *CONNECTION_LOST):
        return Readiness(_reasons(services, ["Redis does not answer."]), [])
    return Readiness(reasons_not_ready(services, fleet), _restoring(fleet))


def reasons_not_ready(services: Services, fleet: Fleet) -> list[str]:
    """Return the reasons that prevent training; empty if ready."""
    return _reasons(services, _fleet_reasons(fleet, services.settings))


def _reasons(services: Services, of_fleet: list[str]) -> list[str]:
    """Add the reasons of this process, of the disk and of the supervisor."""
    draining = ["This process is draining."] if services.draining else []
    return draining + of_fleet + _disk_reasons(services.settings) + read_problems(services.settings.data_dir)


def _restoring(fleet: Fleet) -> list[str]:
    return [
        f"Worker {worker.id} of {pool.record.base_model} is restoring: {text}."
        for pool in sorted(fleet.pools, key=lambda pool: pool.record.id)
        for worker in pool.workers
        if (text := restoring_text(worker.restoring))
    ]


def _fleet_reasons(fleet: Fleet, settings: ServerSettings) -> list[str]:
    reasons, redis = [], fleet.redis
    is_durable = redis.appendonly and redis.appendfsync == "always"
    if not is_durable and not settings.accept_data_loss:
        reasons.append("Redis could lose acknowledged writes.")
    if not redis.aof_last_write_ok:
        reasons.append("Redis could not write its append-only file.")
    if redis.is_replica:
        reasons.append("Redis is a replica, and takes no writes.")
    if not redis.saves:
        reasons.append("Redis could not write its last snapshot, and takes no writes (MISCONF).")
    if not fleet.has_scheduler:
        reasons.append("No scheduler is running.")
    # Requests to a pool that can scale to zero are accepted, and wait for a worker.
    served = {pool.record.base_model for pool in fleet.pools if pool.has_worker or pool.may_have_none}
    if settings.base_models:
        missing = [name for name in settings.base_models if name not in served]
        return reasons + [f"No worker for {name} is running." for name in missing]
    return reasons if served else [*reasons, "No worker is running."]


def _disk_reasons(settings: ServerSettings) -> list[str]:
    free_bytes = shutil.disk_usage(settings.data_dir).free
    if free_bytes > settings.disk_reserve_bytes:
        return []
    reserve = f"{settings.disk_reserve_bytes / 1e9:.3g} GB"
    return [f"The disk is almost full: less than {reserve} is free (COTRAIN_DISK_RESERVE_BYTES)."]


async def brief_status(services: Services) -> dict[str, Any]:
    """Return the state of the server and each pool: sums over tenants, without cycles."""
    return _brief(services, await read_fleet(services.connection))


async def whole_status(services: Services) -> dict[str, Any]:
    """Return the full status: the brief one, each tenant's queue, and the last cycles."""
    connection, fleet = services.connection, await read_fleet(services.connection)
    brief = _brief(services, fleet)
    return {
        **brief,
        "scheduler": {"epoch": fleet.scheduler_epoch},
        "pools": [
            {**shown, **await _details(services, pool)} for shown, pool in zip(brief["pools"], fleet.pools, strict=True)
        ],
        "unread_bytes": await largest_unread_bytes(connection, TENANTS_SHOWN),
        "run_bytes": await largest_run_bytes(connection, TENANTS_SHOWN),
        "waiters": services.futures.waiters,
    }


def _brief(services: Services, fleet: Fleet) -> dict[str, Any]:
    reasons, now = reasons_not_ready(services, fleet), time.time()
    disk = shutil.disk_usage(services.settings.data_dir)
    return {
        "version": __version__,
        "uptime_s": round(now - _STARTED_AT, 1),
        "ready": not reasons,
        "reasons": reasons,
        "pools": [_pool(pool, now) for pool in fleet.pools],
        "redis": asdict(fleet.redis),
        "disk": {"free_bytes": disk.free, "total_bytes": disk.total},
    }


def _pool(pool: PoolStatus, now: float) -> dict[str, Any]:
    queue = sum_of(pool.queues)
    return {
        **asdict(pool.record),
        "workers": [asdict(worker) for worker in pool.workers],
        "workers_known": pool.workers_known,
        "workers_unavailable": list(pool.workers_missing(now)),
        "worker_exits": {
            each.id: {**asdict(each.last_exit), "text": each.last_exit.text} for each in pool.ids if each.last_exit
        },
        "open_cycles": pool.open_cycles,
        "last_cycle": pool.last_cycle,
        "queue": {
            "ops": queue.ops,
            "tokens": queue.tokens,
            "tenants": len(pool.queues),
            "oldest_s": pool.oldest_ready_s,
            "oldest_gap_s": pool.oldest_gap_s,
            "oldest_gap_run": pool.oldest_gap_run,
            "backlog_s": round(pool.backlog_s, 3),
        },
        "workers_wanted": pool.workers_wanted(now),
        "duty": dict(pool.duty),
        "samples": {"waiting": queue.samples_waiting, "running": queue.samples_running},
        "counters": dict(pool.counters),
    }


async def _details(services: Services, pool: PoolStatus) -> dict[str, Any]:
    cycles = await cycle_records(services.connection, pool.record.id, CYCLES_SHOWN)
    queues = [asdict(queue) for queue in pool.queues]
    await _name_tenants(services, [*queues, *(run for each in cycles for run in each.get("runs", ()))])
    return {"tenants": queues, "cycles": cycles}


async def _name_tenants(services: Services, rows: Sequence[dict[str, Any]]) -> None:
    """Add the tenant's name to each row; empty if it has none."""
    names = await tenant_names(services.connection, {row["tenant"] for row in rows})
    for row in rows:
        row["tenant_name"] = names.get(row["tenant"], "")


async def own_status(services: Services, tenant: TenantId) -> dict[str, Any]:
    """Return the part of the status that a tenant may see."""
    connection = services.connection
    return {
        "version": __version__,
        "unread_bytes": (await unread_bytes(connection, [tenant]))[tenant],
        "run_bytes": await run_bytes(connection, tenant),
        "pools": [_own_pool(pool) for pool in await read_pools(connection, tenant)],
    }


def _own_pool(pool: PoolStatus) -> dict[str, Any]:
    record, own = pool.record, sum_of(pool.queues)
    return {
        "base_model": record.base_model,
        "context_length": record.context_length,
        "longest_datum": record.longest_datum,
        "max_rank": record.max_rank,
        "workers": len(pool.workers),
        "last_cycle": pool.last_cycle,
        "queue": {"ops": own.ops, "tokens": own.tokens},
        "samples": {"waiting": own.samples_waiting, "running": own.samples_running},
    }


async def list_workers(services: Services) -> list[WorkerShown]:
    """Return the workers of all pools, including drained and missing ones."""
    pools = await read_pools(services.connection, with_queues=False)
    return [_shown(pool, worker) for pool in pools for worker in pool.ids]


def _shown(pool: PoolStatus, worker: WorkerStatus) -> WorkerShown:
    heartbeat, drain_asked_at = worker.heartbeat, worker.drain_asked_at
    return WorkerShown(
        pool=pool.record.id,
        base_model=pool.record.base_model,
        id=worker.id,
        state=heartbeat.state if heartbeat else "away",
        drain_asked_at=drain_asked_at,
        drain_waits=bool(heartbeat and drain_asked_at is not None and not heartbeat.is_handing_over),
        heartbeat=asdict(heartbeat) if heartbeat else None,
        open_steps=worker.open_steps,
        last_exit=asdict(worker.last_exit) if worker.last_exit else None,
    )


async def list_pools(services: Services) -> list[FleetPool]:
    """Return all pools, and configured base models that no worker has served yet."""
    fleet, now = await read_fleet(services.connection), time.time()
    pools = [_fleet_pool(pool, now) for pool in fleet.pools]
    return [*pools, *map(_unknown, fleet.unserved(services.settings.base_models))]


def _fleet_pool(pool: PoolStatus, now: float) -> FleetPool:
    queue = sum_of(pool.queues)
    return FleetPool(
        base_model=pool.record.base_model,
        pool=pool.record.id,
        workers_wanted=pool.workers_wanted(now),
        workers_unavailable=list(pool.workers_unavailable),
        workers=[_fleet_worker(each, pool) for each in pool.workers],
        ops=queue.ops,
        tokens=queue.tokens,
        oldest_s=round(pool.oldest_ready_s, 3),
        backlog_s=round(pool.backlog_s, 3),
        samples_waiting=queue.samples_waiting,
        samples_running=queue.samples_running,
    )


def _fleet_worker(heartbeat: WorkerHeartbeat, pool: PoolStatus) -> FleetWorker:
    waiting = pool.scaling.waiting_tokens.get(heartbeat.id, 0) if pool.scaling else 0
    return FleetWorker(
        id=heartbeat.id,
        state=heartbeat.state,
        is_draining=heartbeat.state != "serving",
        restoring=Restoring.model_validate(heartbeat.restoring) if heartbeat.restoring else None,
        host=heartbeat.host,
        device=heartbeat.device,
        tokens_per_s=heartbeat.tokens_per_s,
        runs=heartbeat.runs,
        busy=round(heartbeat.busy, 3),
        backlog_s=round(backlog_seconds(waiting, [heartbeat.tokens_per_s], 0.0), 3),
    )


def _unknown(base_model: str) -> FleetPool:
    """Return the entry of a base model without a pool: nothing can wait for it before its first worker starts."""
    return FleetPool(
        base_model=base_model, pool=None, workers_wanted=1, workers_unavailable=[], workers=[],
        ops=0, tokens=0, oldest_s=0.0, backlog_s=0.0, samples_waiting=0, samples_running=0,
    )  # fmt: skip
