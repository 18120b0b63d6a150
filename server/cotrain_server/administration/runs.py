"""One run of a tenant, held back, moved or ended by the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.messages.ids import WorkerId
from cotrain_store.oplog.moves import Moves
from cotrain_store.tenants.audit_log import AuditEvent

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId


async def pause_run(services: Services, tenant: TenantId, run_id: str, reason: str) -> None:
    """Hold a run back; raises RunNotFound, or RunClosed for one that has ended."""
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id, "reason": reason}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_PAUSE, details):
        await services.pauses.pause_run(run, reason)


async def resume_run(services: Services, tenant: TenantId, run_id: str) -> None:
    """Let a run go on; raises RunNotFound. Twice is harmless."""
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_RESUME, details) as act:
        act.is_done = await services.pauses.resume_run(run)


async def move_run(services: Services, tenant: TenantId, run_id: str, worker: str) -> None:
    """Have a run go to another worker of its pool, which replays nothing. Twice is harmless.

    Raises:
        RunNotFound, RunClosed, WorkerNotFound, CannotMove: as `Moves.ask` says.
    """
    run = await services.records.run(tenant, run_id)
    details = {"run": run.id, "worker": worker}
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_MOVE, details):
        await Moves(services.connection).ask(run.pool, run.id, WorkerId(worker))


async def close_run(services: Services, tenant: TenantId, run_id: str) -> None:
    """End a run as its owner can: what waits fails, what is planned commits; raises RunNotFound."""
    run = await services.records.run(tenant, run_id)
    async with services.audit.act_of_operator(tenant, AuditEvent.RUN_CLOSE, {"run": run.id}):
        await services.intake.close_run(run)
