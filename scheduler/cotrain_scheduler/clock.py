"""The loop: wake, read what is ready, plan, write the plan. The only place that sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from cotrain_scheduler import cycle_start, planner
from cotrain_scheduler import reassignment as fleet
from cotrain_store.errors import Fenced, PlanOutdated
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ops import Step
from cotrain_store.monitoring.logs import log_requests
from cotrain_store.redis_client.connection import CONNECTION_LOST, stop_tasks
from cotrain_store.settings.scheduler import ClockMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
    from cotrain_store.messages.ids import PoolId, WorkerId
    from cotrain_store.messages.ops import RunQueue
    from cotrain_store.oplog.dispatch import Dispatch
    from cotrain_store.settings.scheduler import SchedulerSettings

log = structlog.get_logger()

#: A wake-up can be lost; look by ourselves this often.
SWEEP_S = 0.25
#: The lease lasts 3 s.
RENEW_S = 1.0
#: How often old gaps are looked for.
GAPS_S = 5.0
_RETRY_S = 0.2
#: The queue changed under a plan; long enough not to spin should it never settle.
_REPLAN_S = 0.005
#: Between two ticks the host's time may have been set, or the host may have slept.
_JUMP_S = 1.0


@dataclass
class _WorkerClock:
    """What the clock remembers of one worker between cycles."""

    fairness: planner.Fairness = field(default_factory=planner.Fairness)
    last: cycle_start.LastCycle = field(default_factory=cycle_start.LastCycle)
    planned_at: float | None = None
    """When the step in work was planned; None while the worker is free."""


class Clock:
    """Drives every pool until `stop`; stands by while another scheduler leads."""

    def __init__(
        self,
        dispatch: Dispatch,
        settings: SchedulerSettings,
        *,
        gather_s: float = cycle_start.GATHER_S,
        quantum_tokens: int = planner.QUANTUM_TOKENS,
    ) -> None:
        self._dispatch = dispatch
        self._settings = settings
        self._gather_s = gather_s
        self._quantum_tokens = quantum_tokens
        self._clocks: defaultdict[tuple[PoolId, WorkerId], _WorkerClock] = defaultdict(_WorkerClock)
        self._empty_since: defaultdict[PoolId, fleet.Absences] = defaultdict(dict)
        self._woken = asyncio.Event()
        self._has_free_worker = True
        self._stopping = False
        self._renewed_at = 0.0
        self._gaps_at = 0.0
        self._last_period = self._period_number(time.time())
        self._offset_s = time.time() - time.monotonic()

    def stop(self) -> None:
        """Stop after the present tick."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Tick until stopped. An unavailable Redis is a pause."""
        listener = asyncio.create_task(self._listen())
        try:
            while not self._stopping:
                began, now = time.monotonic(), self._now()
                try:
                    wait_s = await self._tick(now) - now
                except CONNECTION_LOST:
                    log.warning("redis_disconnected")
                    wait_s = _RETRY_S
                except Fenced:
                    log.warning("scheduler_fenced")
                    self._renewed_at = 0.0  # stand by: ask for the lease before anything else
                    wait_s = RENEW_S
                await self._sleep(began + wait_s)
        finally:
            await stop_tasks([listener])
            with contextlib.suppress(*CONNECTION_LOST):
                await self._dispatch.resign()

    def _now(self) -> float:
        """Read the host's time. Once that jumped, what was noted before cannot be compared with it."""
        offset_s = time.time() - time.monotonic()
        jumped_s, self._offset_s = offset_s - self._offset_s, offset_s
        now = time.monotonic() + offset_s
        if abs(jumped_s) > _JUMP_S:
            log.warning("time_jumped", by_s=round(jumped_s, 1))
            self._forget_times(now)
        return now

    def _forget_times(self, now: float) -> None:
        """Begin anew with everything that waits for some time to pass; whose turn it is stays."""
        self._renewed_at = self._gaps_at = 0.0
        self._last_period = self._period_number(now)
        self._empty_since.clear()
        for clock in self._clocks.values():
            clock.last = cycle_start.LastCycle()
            clock.planned_at = clock.planned_at and now

    async def _tick(self, now: float) -> float:
        """Plan whatever may start now; return when to look again at the latest."""
        self._woken.clear()
        self._has_free_worker = True  # until this tick knows: what becomes ready during it counts
        if now - self._renewed_at > RENEW_S:
            if not await self._dispatch.lead():
                return now + RENEW_S
            self._renewed_at = now
            await self._dispatch.pass_time()
        pools = await self._dispatch.pools()
        if now - self._gaps_at > GAPS_S:
            self._gaps_at = now
            for pool in pools:
                await self._expire_gaps(pool)
        if self._settings.clock_mode is ClockMode.METRONOME:
            return await self._tick_metronome(pools, now)
        again = [await self._tick_pool(pool, now) for pool in pools]
        self._has_free_worker = any(clock.planned_at is None for clock in self._clocks.values())
        return min(again, default=now + SWEEP_S)

    async def _tick_metronome(self, pools: Sequence[PoolId], now: float) -> float:
        """Plan when a new period begins, and only then; what comes later waits for the next one."""
        number = self._period_number(now)
        next_look = min((number + 1) * self._settings.clock_period_s, now + RENEW_S)
        if number == self._last_period:
            return next_look
        again = [await self._tick_pool(pool, now) for pool in pools]
        if any(start <= now + _REPLAN_S for start in again):
            return now + _REPLAN_S  # the queue changed under a plan: the period is not done with
        self._last_period = number
        return next_look

    def _period_number(self, now: float) -> int:
        return cycle_start.period_number(now, self._settings.clock_period_s)

    async def _tick_pool(self, pool: PoolId, now: float) -> float:
        slots = await self._dispatch.worker_slots(pool)
        await self._reassign(pool, slots, now)
        workers = [slot.heartbeat for slot in slots if slot.heartbeat]
        free = [worker for worker in workers if await self._is_free(pool, worker, now)]
        if not free:
            return now + SWEEP_S
        queues = await self._dispatch.ready(pool)
        if not queues:
            return now + SWEEP_S
        assigned = planner.assign(queues, workers)
        again = now + SWEEP_S
        for worker in free:
            mine = [
                queue for queue in queues if (queue.worker or assigned.get(queue.run)) == worker.id
            ]
            if not mine:
                continue
            start = self._start(pool, worker, mine, now)
            if start > now:
                again = min(again, start)
            elif not await self._plan(pool, worker, mine, now):
                again = min(again, now + _REPLAN_S)
        return again

    async def _reassign(self, pool: PoolId, slots: Sequence[WorkerSlot], now: float) -> None:
        """Give what workers had that are dead for long to living ones."""
        self._empty_since[pool] = fleet.absences(slots, self._empty_since[pool], now)
        after_s = self._settings.reassign_after_s
        for dead, successor in fleet.reassignments(slots, self._empty_since[pool], now, after_s):
            failpoint("reassign.before", dead.worker)
            if await self._dispatch.reassign(pool, dead, successor):
                failpoint("reassign.after", dead.worker)
                log.warning("worker_reassigned", pool=pool, worker=dead.worker, successor=successor)

    async def _is_free(self, pool: PoolId, worker: WorkerHeartbeat, now: float) -> bool:
        if await self._dispatch.open_steps(pool, worker.id):
            return False
        clock = self._clocks[pool, worker.id]
        if clock.planned_at is not None:
            clock.last = replace(clock.last, duration_s=now - clock.planned_at, ended_at=now)
            clock.planned_at = None
        return True

    def _start(
        self, pool: PoolId, worker: WorkerHeartbeat, queues: Sequence[RunQueue], now: float
    ) -> float:
        settings, clock = self._settings, self._clocks[pool, worker.id]
        if settings.clock_mode is ClockMode.METRONOME:
            return now
        ready = [queue.run for queue in queues]
        return cycle_start.eager_start(clock.last, ready, now, self._gather_s)

    async def _plan(
        self, pool: PoolId, worker: WorkerHeartbeat, queues: Sequence[RunQueue], now: float
    ) -> bool:
        """Write one worker's step; False when the queue has changed and must be read again."""
        clock = self._clocks[pool, worker.id]
        tokens = planner.budget(worker, self._settings.clock_period_s)
        chosen = planner.select(
            queues, clock.fairness, tokens, self._quantum_tokens,
            takes_saves=worker.takes_saves,
        )  # fmt: skip
        if not chosen.ops:
            return True  # nothing but saves, which the worker takes none of now
        tenants = {queue.run: queue.tenant for queue in queues}
        cycle = await self._dispatch.last_cycle(pool) + 1
        runs = frozenset(op.run for op in chosen.ops)
        step = Step(cycle, worker.id, chosen.ops, now, {run: tenants[run] for run in runs})
        failpoint("scheduler.before_plan")
        try:
            await self._dispatch.plan(pool, step)
        except PlanOutdated:
            return False
        failpoint("scheduler.after_plan")
        clock.fairness, clock.planned_at = chosen.fairness, now
        clock.last = cycle_start.LastCycle(runs)
        total = sum(op.tokens for op in chosen.ops)
        log_requests(
            log, "cycle_planned", [op.request_id for op in chosen.ops], cycle=cycle,
            pool=pool, worker=worker.id, runs=len(runs), ops=len(chosen.ops), tokens=total,
        )  # fmt: skip
        return True

    async def _expire_gaps(self, pool: PoolId) -> None:
        for run, tenant in await self._dispatch.old_gaps(pool, self._settings.gap_limit_s):
            await self._dispatch.expire_gap(pool, run, tenant)
            log.warning("gap_expired", run=run)

    async def _sleep(self, until: float) -> None:
        """Sleep until woken, at most until the monotonic clock shows `until`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), max(0.0, until - time.monotonic()))

    async def _listen(self) -> None:
        while True:
            try:
                async for is_free in self._dispatch.wakes():
                    # While every worker is busy, a new request changes nothing; nor does anything
                    # within a period.
                    if self._settings.clock_mode is ClockMode.EAGER and (
                        is_free or self._has_free_worker
                    ):
                        self._woken.set()
            except CONNECTION_LOST:
                await asyncio.sleep(_RETRY_S)
