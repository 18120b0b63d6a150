"""Endpoints of the operator for workers, pools and single runs.

`/fleet` returns the wanted number of workers per pool for an autoscaler, as JSON of `/metrics/fleet`.
"""

import time

from cotrain.wire.admin import Fleet, MoveRequest, PauseRequest, SelfCheckAsked, WorkerList
from cotrain_server.administration import find_tenant
from cotrain_server.http.tenant_routes import ServicesDep, operator_router
from cotrain_server.services import Services
from cotrain_server.views.server_status import list_pools, list_workers
from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.moves import Drains, Moves
from cotrain_store.tenants.audit_log import AuditEvent

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
    details = {"pool": pool_id, "worker": worker_id}
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_DRAIN, details):
        await Drains(services.connection).request(PoolId(pool_id), WorkerId(worker_id))


@router.post("/pools/{pool_id}/workers/{worker_id}/undrain", status_code=204)
async def undrain(pool_id: str, worker_id: str, services: ServicesDep) -> None:
    """Put a drained worker back into service. Idempotent."""
    pool, worker = PoolId(pool_id), WorkerId(worker_id)
    details = {"pool": pool, "worker": worker}
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_UNDRAIN, details) as act:
        act.is_done = await Drains(services.connection).withdraw(pool, worker)


@router.post("/pools/{pool_id}/workers/{worker_id}/selfcheck")
async def selfcheck(pool_id: str, worker_id: str, services: ServicesDep) -> SelfCheckAsked:
    """Request a self-check of a worker: passes and samples of temporary adapters alone and in a mix.

    The worker runs it between two cycles. Its result is `self_check` of the worker's heartbeat. Of several requests
    before the worker begins, the newest counts.
    """
    connection, pool = services.connection, PoolId(pool_id)
    if not await connection.sismember(redis_keys.workers(pool), worker_id):
        raise Refused(Reason.WORKER_NOT_FOUND)
    details, now = {"pool": pool_id, "worker": worker_id}, time.time()
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_SELF_CHECK, details):
        await connection.hset(redis_keys.self_checks(pool), worker_id, repr(now))
    return SelfCheckAsked(asked_at=now)


fleet_router = operator_router("/api/v1")


@fleet_router.get("/fleet")
async def fleet(services: ServicesDep) -> Fleet:
    """Show all pools with their workers, pending work, and wanted number of workers."""
    return Fleet(pools=await list_pools(services))


runs_router = operator_router("/api/v1/admin/tenants/{tenant_id}/runs/{run_id}")


@runs_router.post("/pause", status_code=204)
async def pause(tenant_id: str, run_id: str, wanted: PauseRequest, services: ServicesDep) -> None:
    """Pause a run: its requests are accepted, but no cycle takes them. Saved weights can be sampled."""
    run = await _run(services, tenant_id, run_id)
    details = {"run": run.id, "reason": wanted.reason}
    async with services.audit.act_of_operator(run.tenant, AuditEvent.RUN_PAUSE, details):
        await services.pauses.pause_run(run, wanted.reason)


@runs_router.post("/resume", status_code=204)
async def resume(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Resume a run. Idempotent."""
    run = await _run(services, tenant_id, run_id)
    details = {"run": run.id}
    async with services.audit.act_of_operator(run.tenant, AuditEvent.RUN_RESUME, details) as act:
        act.is_done = await services.pauses.resume_run(run)


@runs_router.post("/move", status_code=204)
async def move(tenant_id: str, run_id: str, wanted: MoveRequest, services: ServicesDep) -> None:
    """Move a run to another worker of its pool. Idempotent.

    Its requests wait for the copy, and nothing is replayed. A pass that was open over several
    cycles restarts from its beginning.
    """
    run = await _run(services, tenant_id, run_id)
    details = {"run": run.id, "worker": wanted.worker}
    async with services.audit.act_of_operator(run.tenant, AuditEvent.RUN_MOVE, details):
        await Moves(services.connection).request(run.pool, run.id, WorkerId(wanted.worker))


@runs_router.post("/close", status_code=204)
async def close(tenant_id: str, run_id: str, services: ServicesDep) -> None:
    """Close a run as its owner can. Pending ops fail, planned ops still finish. Idempotent."""
    run = await _run(services, tenant_id, run_id)
    details = {"run": run.id}
    async with services.audit.act_of_operator(run.tenant, AuditEvent.RUN_CLOSE, details):
        await services.intake.close_run(run)


async def _run(services: Services, tenant_id: str, run_id: str) -> RunRecord:
    return await services.records.run(await find_tenant(services, tenant_id), run_id)
