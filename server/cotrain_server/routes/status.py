"""How this server is: for load balancers, dashboards, Prometheus, and tenants about themselves."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from cotrain.version import __version__
from cotrain.wire.sessions import HealthResponse
from cotrain_server.errors import OperatorsOnly
from cotrain_server.http.auth import authenticate, is_operator, note_failure
from cotrain_server.http.dependencies import ServicesDep
from cotrain_server.views.prometheus import TENANTS_SHOWN, process_metrics, store_metrics
from cotrain_server.views.readiness import LOOK_TIMEOUT_S, reasons_not_ready
from cotrain_store.errors import StoreUnavailable
from cotrain_store.monitoring.status import (
    cycle_records,
    pool_status,
    redis_status,
    scheduler_epoch,
)
from cotrain_store.results.delivery import most_unread, unread_bytes
from cotrain_store.tenants.names import tenant_names
from cotrain_store.tenants.run_bytes import largest_run_bytes, run_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.monitoring.status import PoolStatus, QueueStatus

router = APIRouter(tags=["status"])

CYCLES_SHOWN = 20
_STARTED_AT = time.time()


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthz() -> HealthResponse:
    """Say that this process lives. No I/O: a pause of Redis must not restart every API."""
    return HealthResponse()


@router.get("/readyz", response_model=None, responses={503: {"description": "Not ready."}})
async def readyz(services: ServicesDep) -> Response:
    """Say whether requests sent now would be trained on, and if not, why."""
    reasons = await reasons_not_ready(services)
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/status")
async def status(request: Request, services: ServicesDep) -> dict[str, Any]:
    """Show the operator everything, and a tenant (by its API key) its own part."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            if is_operator(request, services):
                return await _everything(services)
            return await _own_part(services, (await authenticate(request, services)).id)
    except TimeoutError:
        raise StoreUnavailable from None


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Show Prometheus what this process does."""
    _check_operator(request, services)
    return Response(process_metrics(services), media_type=CONTENT_TYPE_LATEST)


@router.get("/metrics/fleet")
async def fleet_metrics(request: Request, services: ServicesDep) -> Response:
    """Show Prometheus the store and all pools. Every API process has the same numbers: scrape one of them."""
    _check_operator(request, services)
    return Response(await store_metrics(services), media_type=CONTENT_TYPE_LATEST)


def _check_operator(request: Request, services: Services) -> None:
    if not is_operator(request, services):
        note_failure(request, services)
        raise OperatorsOnly


async def _everything(services: Services) -> dict[str, Any]:
    connection, settings = services.connection, services.settings
    pools = [await _whole_pool(services, pool) for pool in await services.records.pools()]
    reasons = await reasons_not_ready(services)
    return {
        "version": __version__,
        "uptime_s": round(time.time() - _STARTED_AT, 1),
        "ready": not reasons,
        "reasons": reasons,
        "scheduler": {"epoch": await scheduler_epoch(connection)},
        "pools": pools,
        "unread_bytes": await most_unread(connection, TENANTS_SHOWN),
        "run_bytes": await largest_run_bytes(connection, TENANTS_SHOWN),
        "waiters": services.futures.waiters,
        "redis": asdict(await redis_status(connection)),
        "disk": {"free_bytes": shutil.disk_usage(settings.data_dir).free},
    }


async def _whole_pool(services: Services, pool: PoolRecord) -> dict[str, Any]:
    found = await pool_status(services.connection, pool.id)
    cycles = await cycle_records(services.connection, pool.id, CYCLES_SHOWN)
    queues = [asdict(queue) for queue in found.queues]
    await _name_tenants(
        services, [*queues, *(run for each in cycles for run in each.get("runs", ()))]
    )
    return {
        **asdict(pool),
        "workers": [asdict(worker) for worker in found.workers],
        "workers_known": found.workers_known,
        "open_cycles": found.open_cycles,
        "last_cycle": found.last_cycle,
        "queue": {
            "ops": sum(queue.ops for queue in found.queues),
            "tokens": sum(queue.tokens for queue in found.queues),
            "oldest_s": found.oldest_ready_s,
            "oldest_gap_s": found.oldest_gap_s,
        },
        "samples": _samples(found.queues),
        "tenants": queues,
        "counters": dict(found.counters),
        "cycles": cycles,
    }


async def _name_tenants(services: Services, rows: Sequence[dict[str, Any]]) -> None:
    """Add the tenant's name to its id in each row; empty where it has none."""
    names = await tenant_names(services.connection, {row["tenant"] for row in rows})
    for row in rows:
        row["tenant_name"] = names.get(row["tenant"], "")


async def _own_part(services: Services, tenant: TenantId) -> dict[str, Any]:
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
