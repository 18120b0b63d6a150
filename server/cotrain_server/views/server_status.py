"""Content of `/status` and the pages: everything for the operator, its own part for a tenant."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cotrain.version import __version__
from cotrain_server.services import Services
from cotrain_server.views.readiness import reasons_not_ready
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.monitoring.metrics import TENANTS_SHOWN
from cotrain_store.monitoring.status import (
    PoolStatus,
    QueueStatus,
    cycle_records,
    pool_status,
    redis_status,
    scheduler_epoch,
)
from cotrain_store.results.delivery import max_unread, unread_bytes
from cotrain_store.tenants.catalog import tenant_names
from cotrain_store.tenants.run_bytes import largest_run_bytes, run_bytes

CYCLES_SHOWN = 20
_STARTED_AT = time.time()


async def brief_status(services: Services) -> dict[str, Any]:
    """Return the state of the server and each pool: sums over tenants, without cycles."""
    return await _brief(services, await _pools(services))


async def whole_status(services: Services) -> dict[str, Any]:
    """Return the full status: the brief one, each tenant's queue, and the last cycles."""
    connection, found = services.connection, await _pools(services)
    brief = await _brief(services, found)
    return {
        **brief,
        "scheduler": {"epoch": await scheduler_epoch(connection)},
        "pools": [
            {**pool, **await _details(services, status)}
            for pool, (_, status) in zip(brief["pools"], found, strict=True)
        ],
        "unread_bytes": await max_unread(connection, TENANTS_SHOWN),
        "run_bytes": await largest_run_bytes(connection, TENANTS_SHOWN),
        "waiters": services.futures.waiters,
    }


async def _pools(services: Services) -> list[tuple[PoolRecord, PoolStatus]]:
    return [
        (pool, await pool_status(services.connection, pool.id))
        for pool in await services.records.pools()
    ]


async def _brief(
    services: Services, found: Sequence[tuple[PoolRecord, PoolStatus]]
) -> dict[str, Any]:
    reasons, redis = await asyncio.gather(
        reasons_not_ready(services), redis_status(services.connection)
    )
    return {
        "version": __version__,
        "uptime_s": round(time.time() - _STARTED_AT, 1),
        "ready": not reasons,
        "reasons": reasons,
        "pools": [_pool(pool, status) for pool, status in found],
        "redis": asdict(redis),
        "disk": {"free_bytes": shutil.disk_usage(services.settings.data_dir).free},
    }


def _pool(pool: PoolRecord, found: PoolStatus) -> dict[str, Any]:
    return {
        **asdict(pool),
        "workers": [asdict(worker) for worker in found.workers],
        "workers_known": found.workers_known,
        "workers_unavailable": list(found.workers_missing(time.time())),
        "open_cycles": found.open_cycles,
        "last_cycle": found.last_cycle,
        "queue": {
            "ops": sum(queue.ops for queue in found.queues),
            "tokens": sum(queue.tokens for queue in found.queues),
            "tenants": len(found.queues),
            "oldest_s": found.oldest_ready_s,
            "oldest_gap_s": found.oldest_gap_s,
            "backlog_s": round(found.backlog_s, 3),
        },
        "workers_wanted": found.workers_wanted(time.time()),
        "duty": dict(found.duty),
        "samples": _samples(found.queues),
        "counters": dict(found.counters),
    }


async def _details(services: Services, found: PoolStatus) -> dict[str, Any]:
    cycles = await cycle_records(services.connection, found.pool, CYCLES_SHOWN)
    queues = [asdict(queue) for queue in found.queues]
    await name_tenants(
        services, [*queues, *(run for each in cycles for run in each.get("runs", ()))]
    )
    return {"tenants": queues, "cycles": cycles}


async def name_tenants(services: Services, rows: Sequence[dict[str, Any]]) -> None:
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
        "pools": [
            _own_pool(pool, await pool_status(connection, pool.id, tenant))
            for pool in await services.records.pools()
        ],
    }


def _own_pool(pool: PoolRecord, found: PoolStatus) -> dict[str, Any]:
    own = found.queues
    return {
        "base_model": pool.base_model,
        "context_length": pool.context_length,
        "max_rank": pool.max_rank,
        "workers": len(found.workers),
        "last_cycle": found.last_cycle,
        "queue": {"ops": sum(q.ops for q in own), "tokens": sum(q.tokens for q in own)},
        "samples": _samples(own),
    }


def _samples(queues: Sequence[QueueStatus]) -> dict[str, int]:
    return {
        "waiting": sum(queue.samples_waiting for queue in queues),
        "running": sum(queue.samples_running for queue in queues),
    }
