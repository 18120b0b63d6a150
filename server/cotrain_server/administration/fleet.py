"""The fleet as an autoscaler asks for it: how many are wanted of each base model, and what those there do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cotrain.wire.fleet import FleetPool, FleetWorker
from cotrain_store.monitoring.backlog import backlog_seconds, computed
from cotrain_store.monitoring.status import pool_status

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.monitoring.status import PoolStatus


async def list_pools(services: Services) -> list[FleetPool]:
    """Read all pools, and base models that this server is set to serve and no worker has served yet."""
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
        host=heartbeat.host,
        device=heartbeat.device,
        tokens_per_s=heartbeat.tokens_per_s,
        runs=heartbeat.runs,
        busy=round(computed(heartbeat.duty), 3),
        backlog_s=round(backlog_seconds(waiting, [heartbeat.tokens_per_s], 0.0), 3),
    )


def _unknown(base_model: str) -> FleetPool:
    """Show a base model that is to be served: its first worker has to come before anything can wait for one."""
    return FleetPool(
        base_model=base_model, pool=None, workers_wanted=1, workers_unavailable=[], workers=[],
        ops=0, tokens=0, oldest_s=0.0, backlog_s=0.0, samples_waiting=0, samples_running=0,
    )  # fmt: skip
