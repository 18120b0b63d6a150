"""The workers of all pools: how each is, and take one out of service without losing anything."""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.admin import WorkerList
from cotrain_server.administration.workers import drain_worker, list_workers, take_worker_back
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

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
