"""Demand of a pool, from which the number of its workers is decided, and the record of that
decision.
"""

from __future__ import annotations

from cotrain_store.errors import Fenced
from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.messages.fleet import Pauses, Scaling, parse_scaling
from cotrain_store.messages.ids import PoolId, RunId, encode
from cotrain_store.monitoring.backlog import Demand, computed
from cotrain_store.monitoring.status import PoolStatus, pool_status
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

#: Maximum number of ready runs checked for a pause. Further ones count as not paused.
RUNS_READ = 1_000


def demand_of(status: PoolStatus, pauses: Pauses, paused_runs: int = 0) -> Demand:
    """Return the demand of a pool; `paused_runs` of its ready runs are paused."""
    queues = [queue for queue in status.queues if queue.tenant not in pauses.tenants]
    serving = [worker for worker in status.workers if not worker.is_handing_over]
    return Demand(
        tokens=sum(queue.tokens for queue in queues),
        runs=max(0, status.ready_runs - paused_runs) + status.open_cycles,
        samples=sum(queue.samples_waiting + queue.samples_running for queue in queues),
        rates=tuple(worker.tokens_per_s for worker in serving),
        measured=status.measured_tokens_per_s,
        busy=sum(min(1.0, computed(worker.duty)) for worker in serving),
    )


class ScalingRecords:
    """Scaling records of all pools."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._write = async_script(connection, "scaling")

    async def read(self, pool: PoolId) -> Scaling | None:
        """Return the last decision of a pool; None before the first one."""
        return parse_scaling(await self._redis.get(fleet_keys.scaling(pool)))

    async def demand(self, pool: PoolId, pauses: Pauses) -> Demand:
        """Return the demand of a pool, without paused work."""
        paused_runs = await self._paused_runs(pool, pauses)
        return demand_of(await pool_status(self._redis, pool), pauses, paused_runs)

    async def _paused_runs(self, pool: PoolId, pauses: Pauses) -> int:
        """Return the number of ready runs that are paused, or whose tenants are."""
        if not pauses.tenants and not pauses.runs:
            return 0
        ready = await self._redis.zrange(run_keys.ready(pool), 0, RUNS_READ - 1)
        runs = [RunId(name.decode()) for name in ready]
        pipeline = self._redis.pipeline(transaction=False)
        for run in runs:
            pipeline.hget(run_keys.log(pool, run), "tenant")
        tenants = await pipeline.execute() if runs else []
        return sum(
            run in pauses.runs or (tenant or b"").decode() in pauses.tenants
            for run, tenant in zip(runs, tenants, strict=True)
        )

    async def write(self, pool: PoolId, scaling: Scaling, epoch: int) -> None:
        """Store the decision for all API processes, and for the next scheduler.

        Raises:
            Fenced: a newer scheduler than that of this epoch leads.
        """
        script_keys = [fleet_keys.scheduler_epoch(), fleet_keys.scaling(pool)]
        if await self._write(script_keys, {"epoch": str(epoch)}, encode(scaling)) == b"FENCED":
            raise Fenced
