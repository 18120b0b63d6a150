"""Endpoints of the operator for workers, pools and single runs.

`/fleet` returns the wanted number of workers per pool for an autoscaler, as JSON of `/metrics/fleet`.
"""

from cotrain.wire.admin import MoveRequest, PauseRequest, SelfCheckAsked, WorkerList
from cotrain.wire.status import Fleet
from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.administration.workers import (
    ask_self_check,
    close_run,
    drain_worker,
    move_run,
    pause_run,
    resume_run,
    take_worker_back,
)
from cotrain_server.http.tenant_routes import ServicesDep, operator_router
from cotrain_server.views.server_status import list_pools, list_workers

router = operator_router("/api/v1/admin")


@router.get("/workers")
async def workers(services: ServicesDep) -> WorkerList:
    """List the workers of all pools, including drained and missing ones."""
    return WorkerList(workers=await list_workers(services))


@router.post("/pools/{pool_id}/workers/{worker_id}/drain", status_code=204)
async def drain(pool_id: str, worker_id: str, services: ServicesDep) -> None:
    """Move a worker's runs to the other workers of its pool. It accepts no further runs, also after a restart.

    Without another worker it keeps its runs, and reports that.
    """
    await drain_worker(services, pool_id, worker_id)


@router.post("/pools/{pool_id}/workers/{worker_id}/undrain", status_code=204)
async def undrain(pool_id: str, worker_id: str, services: ServicesDep) -> None:
    """Put a drained worker back into service. Idempotent."""
    await take_worker_back(services, pool_id, worker_id)


@router.post("/pools/{pool_id}/workers/{worker_id}/selfcheck")
async def selfcheck(pool_id: str, worker_id: str, services: ServicesDep) -> SelfCheckAsked:
    """Request a self-check of a worker: passes of temporary adapters alone, and in one mixed cycle.

    The worker runs it between two cycles. Its result is `self_check` of the worker's heartbeat.
    """
    return SelfCheckAsked(asked_at=await ask_self_check(services, pool_id, worker_id))


fleet_router = operator_router("/api/v1")


@fleet_router.get("/fleet")
async def fleet(services: ServicesDep) -> Fleet:
    """Show all pools with their workers, pending work, and wanted number of workers."""
    return Fleet(pools=await list_pools(services))


runs_router = operator_router("/api/v1/admin/tenants/{tenant_id}/runs/{run_id}")


@runs_router.post("/pause", status_code=204)
async def pause(tenant_id: str, run_id: str, wanted: PauseRequest, services: ServicesDep) -> None:
    """Pause a run: its requests are accepted, but no cycle takes them. Saved weights can be sampled."""
    await pause_run(services, await find_tenant(services, tenant_id), run_id, wanted.reason)


@runs_router.post("/resume", status_code=204)
async def resume(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Resume a run. Idempotent."""
    await resume_run(services, await find_tenant(services, tenant_id), run_id)


@runs_router.post("/move", status_code=204)
async def move(tenant_id: str, run_id: str, wanted: MoveRequest, services: ServicesDep) -> None:
    """Move a run to another worker of its pool. Idempotent.

    Its requests wait for the copy, and nothing is replayed. A pass that was open over several
    cycles restarts from its beginning.
    """
    await move_run(services, await find_tenant(services, tenant_id), run_id, wanted.worker)


@runs_router.post("/close", status_code=204)
async def close(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Close a run as its owner can. Pending ops fail, planned ops still finish. Idempotent."""
    await close_run(services, await find_tenant(services, tenant_id), run_id)
