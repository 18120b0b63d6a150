"""The real scheduler, ticked by hand, and its cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from cotrain_scheduler.clock import RENEW_S
from cotrain_scheduler.pool_clock import PoolClock
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.messages.ops import Wake
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.redis_client.connection import open_connection
from cotrain_store.settings.scheduler import SchedulerSettings


@dataclass
class Costs:
    """Processor time in s."""

    ticks: int = 0
    scheduler_s: float = 0.0
    redis_s: float = 0.0
    planning_s: float = 0.0
    """Time of both processes in ticks that planned something, without idle ticks."""
    tick_s: list[float] = field(default_factory=list)


class Scheduler:
    """Scheduler of one pool in this process."""

    def __init__(
        self, name: str, settings: SchedulerSettings, pool: PoolId, redis_pid: int,
        before: Scheduler | None,
    ) -> None:  # fmt: skip
        self._connection = open_connection(settings.redis_url)
        self._dispatch = Dispatch(self._connection, name)
        self._pool = pool
        self._clock = PoolClock(self._dispatch, settings, pool)
        self._redis_pid = redis_pid
        self._led_at = 0.0
        self._last_s = 0.0
        self.costs: Costs = before.costs if before else Costs()
        self.was_freed = True

    def forget_costs(self) -> None:
        self.costs = Costs()

    async def tick(self, now: float) -> float:
        """Tick like a woken scheduler; return the time of its next tick without a wake-up."""
        self.was_freed = False
        before, redis_before = time.process_time(), cpu_s(self._redis_pid)
        if now - self._led_at > RENEW_S:
            await self._dispatch.lead()
            await self._dispatch.pass_time()
            self._led_at = now
        again = await self._clock.tick(now)
        took_s, redis_s = time.process_time() - before, cpu_s(self._redis_pid) - redis_before
        self.costs.ticks += 1
        self.costs.scheduler_s += took_s
        self.costs.redis_s += redis_s
        self.costs.tick_s.append(took_s)
        self._last_s = took_s + redis_s
        return again

    def worker_of(self, run: RunId) -> str | None:
        """Return the worker at which a runnable, unplanned run waits: its current or assigned one."""
        return self._clock._queue._at.get(run)

    def note_planned(self) -> None:
        """Record that the last tick planned something."""
        self.costs.planning_s += self._last_s
        self._last_s = 0.0

    def is_woken_by(self, worker: str) -> bool:
        """Return True if a request of a run on this worker wakes the scheduler."""
        return self._clock.is_woken_by(
            Wake(self._pool, WorkerId(worker) if worker else None, False)
        )

    async def let_lease_run_out(self) -> None:
        """Release the lease as after a kill of this scheduler; it leaves nothing else."""
        await self._connection.delete(fleet_keys.scheduler_lease())
        await self._connection.aclose()

    async def close(self) -> None:
        await self._connection.aclose()


def cpu_s(pid: int) -> float:
    """Return the processor time of Redis' main thread in s, with a resolution of 1 ns."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
