"""The workers of all pools: how each is, and take one out of service without losing anything.

How many workers each pool is to have, for an autoscaler: JSON of what `/metrics/fleet` says of it.

One run of a tenant: hold it back, let it go on, move it, end it.
"""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.admin import MoveRequest, PauseRequest, WorkerList
from cotrain.wire.status import Fleet
from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.administration.workers import (
    close_run,
    drain_worker,
    list_pools,
    list_workers,
    move_run,
    pause_run,
    resume_run,
    take_worker_back,
)
from cotrain_server.http.tenant_routes import OperatorRoute, ServicesDep, api_key

router = APIRouter(
    prefix="/api/v1/admin", tags=["admin"], route_class=OperatorRoute, dependencies=[api_key]
)


@router.get("/workers")
async def workers(services: ServicesDep) -> WorkerList:
    """List the workers of all pools, those that are drained or away among them."""
    return WorkerList(workers=await list_workers(services))


@router.post("/pools/{pool_id}/workers/{worker_id}/drain", status_code=204)
async def drain(pool_id: str, worker_id: str, services: ServicesDep) -> None:
    """Hand a worker's runs to the others of its pool. It takes nothing more, also after a restart; without
    another worker it keeps its runs, and says so.
    """
    await drain_worker(services, pool_id, worker_id)


@router.post("/pools/{pool_id}/workers/{worker_id}/undrain", status_code=204)
async def undrain(pool_id: str, worker_id: str, services: ServicesDep) -> None:
    """Let a worker take runs again. Twice is harmless."""
    await take_worker_back(services, pool_id, worker_id)


fleet_router = APIRouter(
    prefix="/api/v1", tags=["admin"], route_class=OperatorRoute, dependencies=[api_key]
)


@fleet_router.get("/fleet")
async def fleet(services: ServicesDep) -> Fleet:
    """Show all pools with their workers, what waits, and how many workers are wanted."""
    return Fleet(pools=await list_pools(services))


runs_router = APIRouter(
    prefix="/api/v1/admin/tenants/{tenant_id}/runs/{run_id}",
    tags=["admin"],
    route_class=OperatorRoute,
    dependencies=[api_key],
)


@runs_router.post("/pause", status_code=204)
async def pause(tenant_id: str, run_id: str, wanted: PauseRequest, services: ServicesDep) -> None:
    """Hold a run back: no cycle takes its requests, which are accepted. Saved weights can be sampled."""
    await pause_run(services, await find_tenant(services, tenant_id), run_id, wanted.reason)


@runs_router.post("/resume", status_code=204)
async def resume(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Let a run go on. Twice is harmless."""
    await resume_run(services, await find_tenant(services, tenant_id), run_id)


@runs_router.post("/move", status_code=204)
async def move(tenant_id: str, run_id: str, wanted: MoveRequest, services: ServicesDep) -> None:
    """Have a run go on at another worker of its pool. Its requests wait for the copy that is made, and nothing is
    replayed; a pass that was open over several cycles runs from its beginning. Twice is harmless.
    """
    await move_run(services, await find_tenant(services, tenant_id), run_id, wanted.worker)


@runs_router.post("/close", status_code=204)
async def close(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """End a run as its owner can: what waits fails, what is planned still comes. Twice is harmless."""
    await close_run(services, await find_tenant(services, tenant_id), run_id)
