"""One run of a tenant: hold it back, let it go on, move it, end it."""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.admin import MoveRequest, PauseRequest
from cotrain_server.administration.runs import close_run, move_run, pause_run, resume_run
from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

router = APIRouter(
    prefix="/api/v1/admin/tenants/{tenant_id}/runs/{run_id}",
    tags=["admin"],
    route_class=OperatorRoute,
    dependencies=[api_key],
)


@router.post("/pause", status_code=204)
async def pause(tenant_id: str, run_id: str, wanted: PauseRequest, services: ServicesDep) -> None:
    """Hold a run back: no cycle takes its requests, which are accepted. Saved weights can be sampled."""
    await pause_run(services, await find_tenant(services, tenant_id), run_id, wanted.reason)


@router.post("/resume", status_code=204)
async def resume(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Let a run go on. Twice is harmless."""
    await resume_run(services, await find_tenant(services, tenant_id), run_id)


@router.post("/move", status_code=204)
async def move(tenant_id: str, run_id: str, wanted: MoveRequest, services: ServicesDep) -> None:
    """Have a run go on at another worker of its pool. Its requests wait for the copy that is made, and nothing is
    replayed; a pass that was open over several cycles runs from its beginning. Twice is harmless.
    """
    await move_run(services, await find_tenant(services, tenant_id), run_id, wanted.worker)


@router.post("/close", status_code=204)
async def close(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """End a run as its owner can: what waits fails, what is planned still comes. Twice is harmless."""
    await close_run(services, await find_tenant(services, tenant_id), run_id)
