"""Workers, pools and single runs: lists for the operator and an autoscaler, and actions on them."""

from __future__ import annotations

import json
import time

from cotrain.wire.admin import WorkerShown
from cotrain.wire.status import FleetPool, FleetWorker, Restoring
from cotrain_server.services import Services
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, TenantId, WorkerId
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.monitoring.backlog import backlog_seconds, computed
from cotrain_store.monitoring.status import PoolStatus, pool_status
from cotrain_store.oplog.moves import Drains, Moves
from cotrain_store.tenants.audit_log import AuditEvent


async def list_workers(services: Services) -> list[WorkerShown]:
    """Return the workers of all pools, including drained and missing ones."""
    pools = await services.records.pools()
    return [shown for pool in pools for shown in await _of_pool(services, pool)]


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


async def _of_pool(services: Services, pool: PoolRecord) -> list[WorkerShown]:
    redis = services.connection
    asked = await Drains(redis).asked(pool.id)
    listed = {WorkerId(name.decode()) for name in await redis.smembers(fleet_keys.workers(pool.id))}
    names = sorted(listed | asked.keys())
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        pipeline.get(fleet_keys.worker(pool.id, name))
        pipeline.hlen(fleet_keys.open_steps(pool.id, name))
    rows = await pipeline.execute()
    shown = []
    for name, row, open_steps in zip(names, rows[::2], rows[1::2], strict=True):
        heartbeat = json.loads(row) if row else None
        shown.append(
            WorkerShown(
                pool=pool.id,
                base_model=pool.base_model,
                id=name,
                state=heartbeat["state"] if heartbeat else "away",
                drain_asked_at=asked.get(name),
                drain_waits=bool(
                    heartbeat and name in asked and not heartbeat.get("is_handing_over")
                ),
                heartbeat=heartbeat,
                open_steps=open_steps,
            )
        )
    return shown


async def list_pools(services: Services) -> list[FleetPool]:
    """Return all pools, and configured base models that no worker has served yet."""
    now = time.time()
    records = await services.records.pools()
    pools = [_pool(each, await pool_status(services.connection, each.id), now) for each in records]
    unknown = await services.records.not_yet_served()
    return [*pools, *(_unknown(base_model) for base_model in unknown)]


def _pool(record: PoolRecord, found: PoolStatus, now: float) -> FleetPool:
    queues = found.queues
    return FleetPool(
        base_model=record.base_model,
        pool=record.id,
        workers_wanted=found.workers_wanted(now),
        workers_unavailable=list(found.workers_unavailable),
        workers=[_worker(each, found) for each in found.workers],
        ops=sum(queue.ops for queue in queues),
        tokens=sum(queue.tokens for queue in queues),
        oldest_s=round(found.oldest_ready_s, 3),
        backlog_s=round(found.backlog_s, 3),
        samples_waiting=sum(queue.samples_waiting for queue in queues),
        samples_running=sum(queue.samples_running for queue in queues),
    )


def _worker(heartbeat: WorkerHeartbeat, found: PoolStatus) -> FleetWorker:
    waiting = found.scaling.waiting_tokens.get(heartbeat.id, 0) if found.scaling else 0
    return FleetWorker(
        id=heartbeat.id,
        state=heartbeat.state,
        is_draining=heartbeat.state != "serving",
        restoring=Restoring.model_validate(heartbeat.restoring) if heartbeat.restoring else None,
        host=heartbeat.host,
        device=heartbeat.device,
        tokens_per_s=heartbeat.tokens_per_s,
        runs=heartbeat.runs,
        busy=round(computed(heartbeat.duty), 3),
        backlog_s=round(backlog_seconds(waiting, [heartbeat.tokens_per_s], 0.0), 3),
    )


def _unknown(base_model: str) -> FleetPool:
    """Return the entry of a base model without a pool: nothing can wait for it before its first
    worker starts.
    """
    return FleetPool(
        base_model=base_model, pool=None, workers_wanted=1, workers_unavailable=[], workers=[],
        ops=0, tokens=0, oldest_s=0.0, backlog_s=0.0, samples_waiting=0, samples_running=0,
    )  # fmt: skip


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
    """Move a run to another worker of its pool without a replay. Idempotent.

    Raises:
        RunNotFound, RunClosed, WORKER_NOT_FOUND, CANNOT_MOVE: see `Moves.ask`.
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
