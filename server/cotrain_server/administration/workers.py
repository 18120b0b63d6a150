"""Actions of the operator on workers and single runs, with their audit entries."""

import time

from cotrain_server.services import Services
from cotrain_store.errors import Reason, Refused
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import PoolId, TenantId, WorkerId
from cotrain_store.oplog.moves import Drains, Moves
from cotrain_store.tenants.audit_log import AuditEvent


async def drain_worker(services: Services, pool: str, worker: str) -> None:
    """Move a worker's runs to the others of its pool. Raises WORKER_NOT_FOUND. Idempotent."""
    details = {"pool": pool, "worker": worker}
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_DRAIN, details):
        await Drains(services.connection).ask(PoolId(pool), WorkerId(worker))


async def take_worker_back(services: Services, pool: str, worker: str) -> None:
    """Put a drained worker back into service. Idempotent."""
    details = {"pool": pool, "worker": worker}
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_UNDRAIN, details) as act:
        act.is_done = await Drains(services.connection).take_back(PoolId(pool), WorkerId(worker))


async def ask_self_check(services: Services, pool: str, worker: str) -> float:
    """Request a self-check of a worker; return the time of the request in s since the epoch.

    Raises WORKER_NOT_FOUND. Of several requests before the worker begins, the newest counts.
    """
    connection, details = services.connection, {"pool": pool, "worker": worker}
    if not await connection.sismember(fleet_keys.workers(PoolId(pool)), worker):
        raise Refused(Reason.WORKER_NOT_FOUND)
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_SELF_CHECK, details):
        key, now = fleet_keys.self_checks(PoolId(pool)), time.time()
        await connection.hset(key, worker, repr(now))
    return now


async def pause_run(services: Services, tenant: TenantId, run_id: str, reason: str) -> None:
    """Pause a run. Raises RunNotFound, or RunClosed if it has ended."""
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id, "reason": reason}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_PAUSE, details):
        await services.pauses.pause_run(run, reason)


async def resume_run(services: Services, tenant: TenantId, run_id: str) -> None:
    """Resume a run. Raises RunNotFound. Idempotent."""
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_RESUME, details) as act:
        act.is_done = await services.pauses.resume_run(run)


async def move_run(services: Services, tenant: TenantId, run_id: str, worker: str) -> None:
    """Move a run to another worker of its pool without a replay. Idempotent. Raises RunNotFound, RunClosed,
    WORKER_NOT_FOUND, CANNOT_MOVE: see `Moves.ask`.
    """
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id, "worker": worker}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_MOVE, details):
        await Moves(services.connection).ask(run.pool, run.id, WorkerId(worker))


async def close_run(services: Services, tenant: TenantId, run_id: str) -> None:
    """Close a run as its owner can. Pending ops fail, planned ops commit. Raises RunNotFound."""
    run = await services.records.run(tenant, run_id)
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_CLOSE, {"run": run.id}):
        await services.intake.close_run(run)
