"""Readiness of this server, with the reasons in sentences for an operator."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence

from cotrain_server.problems import read_troubles
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.monitoring.status import (
    pools_to_zero,
    pools_with_workers,
    redis_status,
    restoring_workers,
    scheduler_alive,
)
from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection
from cotrain_store.redis_client.refusals import REFUSALS
from cotrain_store.tenants.records import Records

REDIS_TIMEOUT_S = 1.0
#: A server with an unavailable Redis answers before its caller times out. Prometheus waits 10 s.
LOOK_TIMEOUT_S = 5.0


async def reasons_not_ready(services: Services) -> list[str]:
    """Return the reasons that prevent training; empty if ready."""
    reasons = ["This process is draining."] if services.draining else []
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            reasons += await _store_reasons(services.connection, services.settings)
    except REFUSALS as refused:
        reasons.append(f"Redis takes nothing for now: {refused}")
    except (TimeoutError, *CONNECTION_LOST):
        reasons.append("Redis does not answer.")
    return reasons + _disk_reasons(services.settings) + read_troubles(services.settings.data_dir)


async def restoring_notices(services: Services) -> list[str]:
    """List the workers that restore runs, in sentences: requests of those runs wait."""
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            pools = {
                pool.id: pool.base_model for pool in await Records(services.connection).pools()
            }
            found = await restoring_workers(services.connection, pools)
    except (TimeoutError, *CONNECTION_LOST):
        return []
    return [
        f"Worker {worker} of {pools[pool]} is restoring: {text}." for pool, worker, text in found
    ]


async def _store_reasons(connection: Connection, settings: ServerSettings) -> list[str]:
    reasons = []
    redis = await redis_status(connection)
    durable = redis.appendonly and redis.appendfsync == "always"
    if not durable and not settings.accept_data_loss:
        reasons.append("Redis could lose acknowledged writes.")
    if not redis.aof_last_write_ok:
        reasons.append("Redis could not write its append-only file.")
    if redis.is_replica:
        reasons.append("Redis is a replica, and takes no writes.")
    if not redis.saves:
        reasons.append("Redis could not write its last snapshot, and takes no writes (MISCONF).")
    if not await scheduler_alive(connection):
        reasons.append("No scheduler is running.")
    return reasons + await _worker_reasons(connection, settings.base_models)


async def _worker_reasons(connection: Connection, expected: Sequence[str]) -> list[str]:
    pools = await Records(connection).pools()
    ids = [pool.id for pool in pools]
    # Requests to a pool that can scale to zero are accepted, and wait for a worker.
    fine = await pools_with_workers(connection, ids) | await pools_to_zero(connection, ids)
    served = {pool.base_model for pool in pools if pool.id in fine}
    if expected:
        return [f"No worker for {name} is running." for name in expected if name not in served]
    return [] if served else ["No worker is running."]


def _disk_reasons(settings: ServerSettings) -> list[str]:
    free_bytes = shutil.disk_usage(settings.data_dir).free
    return [] if free_bytes > settings.disk_reserve_bytes else ["The disk is almost full."]
