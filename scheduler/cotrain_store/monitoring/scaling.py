"""What a pool has to do, read for the decision how many workers it is to have; and the record of that decision."""

from __future__ import annotations

from cotrain_store.errors import Fenced
from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.messages.fleet import Pauses, Scaling, parse_scaling
from cotrain_store.messages.ids import PoolId, RunId, encode
from cotrain_store.monitoring.backlog import Demand, computed
from cotrain_store.monitoring.status import PoolStatus, pool_status
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

#: Runs that are looked at one by one where some are held back; any more count as if they were not.
RUNS_READ = 1_000


def demand_of(status: PoolStatus, pauses: Pauses, paused_runs: int = 0) -> Demand:
    """Sum up what a pool has to do; `paused_runs` of those that could go on are held back."""
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
    """The records, of all pools."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._write = async_script(connection, "scaling")

    async def read(self, pool: PoolId) -> Scaling | None:
        """Read what was decided last of a pool; None before the first time."""
        return parse_scaling(await self._redis.get(fleet_keys.scaling(pool)))

    async def demand(self, pool: PoolId, pauses: Pauses) -> Demand:
        """Read what a pool has to do, those aside who are held back."""
        paused_runs = await self._paused_runs(pool, pauses)
        return demand_of(await pool_status(self._redis, pool), pauses, paused_runs)

    async def _paused_runs(self, pool: PoolId, pauses: Pauses) -> int:
        """Count the runs that could go on, were they or their tenants not held back."""
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
        """Keep it for all API processes, and for the next scheduler.

        Raises:
            Fenced: a newer scheduler than that of this epoch leads.
        """
        script_keys = [fleet_keys.scheduler_epoch(), fleet_keys.scaling(pool)]
        if await self._write(script_keys, {"epoch": str(epoch)}, encode(scaling)) == b"FENCED":
            raise Fenced
