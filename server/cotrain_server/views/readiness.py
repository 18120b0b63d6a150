"""Readiness of this server, with the reasons in sentences for an operator."""

import asyncio
import shutil

from cotrain_server.probe import read_troubles
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.messages.fleet import restoring_text
from cotrain_store.monitoring.fleet import Fleet, read_fleet, read_pools
from cotrain_store.redis_client.clients import REFUSALS
from cotrain_store.redis_client.connection import CONNECTION_LOST

REDIS_TIMEOUT_S = 1.0
#: Time limit of a page or a metrics response that reads the fleet. Prometheus gives up after 10 s.
FLEET_TIMEOUT_S = 5.0


async def reasons_not_ready(services: Services) -> list[str]:
    """Return the reasons that prevent training; empty if ready."""
    reasons = ["This process is draining."] if services.draining else []
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            fleet = await read_fleet(services.connection, with_queues=False)
            reasons += _fleet_reasons(fleet, services.settings)
    except REFUSALS as refused:
        reasons.append(f"Redis takes nothing for now: {refused}")
    except (TimeoutError, *CONNECTION_LOST):
        reasons.append("Redis does not answer.")
    return reasons + _disk_reasons(services.settings) + read_troubles(services.settings.data_dir)


async def restoring_notices(services: Services) -> list[str]:
    """Return one sentence for each worker that restores runs, whose requests wait."""
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            pools = await read_pools(services.connection, with_queues=False)
    except (TimeoutError, *CONNECTION_LOST):
        return []
    return [
        f"Worker {worker.id} of {pool.record.base_model} is restoring: {text}."
        for pool in sorted(pools, key=lambda pool: pool.record.id)
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
    return [] if free_bytes > settings.disk_reserve_bytes else ["The disk is almost full."]
