"""The workers of all pools as the operator sees them, and whether one is to be drained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cotrain.wire.admin import WorkerShown
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.oplog.drains import Drains
from cotrain_store.tenants.audit_log import AuditEvent

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_store.messages.pools import PoolRecord


async def list_workers(services: Services) -> list[WorkerShown]:
    """List the workers of all pools, those that are drained or away among them."""
    pools = await services.records.pools()
    return [shown for pool in pools for shown in await _of_pool(services, pool)]


async def drain_worker(services: Services, pool: str, worker: str) -> None:
    """Have a worker's runs go to the others of its pool; raises WorkerNotFound. Twice is harmless."""
    details = {"pool": pool, "worker": worker}
    async with services.audit.act_of_operator(None, AuditEvent.WORKER_DRAIN, details):
        await Drains(services.connection).ask(PoolId(pool), WorkerId(worker))


async def take_worker_back(services: Services, pool: str, worker: str) -> None:
    """Let a worker take runs again. Twice is harmless."""
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
                drain_waits=bool(heartbeat and name in asked and not heartbeat.get("hands_over")),
                heartbeat=heartbeat,
                open_steps=open_steps,
            )
        )
    return shown
