"""Scheduler process: lead or stand by, and tick every pool in its own task. Only this module sleeps."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from cotrain_scheduler import planner
from cotrain_scheduler.pool_scheduler import PoolScheduler
from cotrain_scheduler.scaling import DECIDE_EVERY_S, PoolScaling
from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import PlanPolicy
from cotrain_store.messages.ids import PoolId
from cotrain_store.monitoring import metrics
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.redis_client.connection import CONNECTION_LOST, stop_tasks
from cotrain_store.settings import SchedulerSettings

log = structlog.get_logger()

#: Renewal interval of the lease, which lasts 3 s.
RENEW_S = 1.0
#: Interval between searches for expired gaps.
GAPS_S = 5.0
#: Minimum interval between two ticks of a pool, in s: the runs of a cycle return one by one, and each wakes the
#: scheduler. It is shorter than the minimum wait for them (`planner.GATHER_S`).
MIN_TICK_S = 0.003
_RETRY_S = 0.2


class Scheduler:
    """Driver of every pool until `stop`; stands by while another scheduler leads."""

    def __init__(
        self,
        dispatch: Dispatch,
        settings: SchedulerSettings,
        *,
        gather_s: float = planner.GATHER_S,
        quantum_tokens: int = planner.QUANTUM_TOKENS,
    ) -> None:
        self._dispatch = dispatch
        self._settings = settings
        self._gather_s = gather_s
        self._quantum_tokens = quantum_tokens
        self._pools: dict[PoolId, tuple[PoolScheduler, asyncio.Event]] = {}
        self._policy = PlanPolicy()
        self._stopped = asyncio.Event()
        self._leads = False
        self._gaps_at = 0.0

    def stop(self) -> None:
        """Stop after the current ticks."""
        self._stopped.set()
        self._wake_all()

    async def run(self) -> None:
        """Lead or stand by until stopped. While Redis is unavailable, it waits."""
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen())
                await self._repeat(self._stopped, lambda: self._keep_lead(tasks))
                await stop_tasks([listener])
        finally:
            with contextlib.suppress(*CONNECTION_LOST):
                await self._dispatch.resign()

    async def _repeat(self, woken: asyncio.Event, act: Callable[[], Awaitable[float]]) -> None:
        """Repeat `act` until stopped. It returns the seconds to wait, unless `woken` is set earlier."""
        while not self._stopped.is_set():
            began = time.monotonic()
            woken.clear()
            try:
                wait_s = await act()
            except CONNECTION_LOST:
                log.warning("redis_disconnected")
                self._reload_queues()  # writes may have been lost or applied
                wait_s = _RETRY_S
            except Fenced:
                log.warning("scheduler_fenced")
                self._leads = False
                metrics.SCHEDULER_LEADER.set(0)
                wait_s = RENEW_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), max(0.0, began + wait_s - time.monotonic()))
            if (early_s := began + MIN_TICK_S - time.monotonic()) > 0:
                await asyncio.sleep(early_s)

    async def _keep_lead(self, tasks: asyncio.TaskGroup) -> float:
        """Acquire or renew the lease, advance the store's time, and drive new pools."""
        epoch = self._dispatch.epoch
        leads = await self._dispatch.lead()
        if leads:  # before any pool plans, so that paused tenants are excluded
            self._policy = await self._dispatch.policy()
            for pool_scheduler, _ in self._pools.values():
                pool_scheduler.policy = self._policy
        led, self._leads = self._leads, leads
        metrics.SCHEDULER_LEADER.set(leads)
        if not leads:
            return RENEW_S
        if self._dispatch.epoch != epoch:
            self._reload_queues()  # another scheduler led in between
        await self._dispatch.pass_time()
        pools = await self._dispatch.pools()
        for pool in pools:
            if pool not in self._pools:
                self._drive(pool, await self._dispatch.base_model(pool), tasks)
        if not led:
            self._wake_all()
        if time.monotonic() - self._gaps_at > GAPS_S:
            self._gaps_at = time.monotonic()
            for pool in pools:
                for run, tenant in await self._dispatch.old_gaps(pool, self._settings.gap_limit_s):
                    await self._dispatch.expire_gap(pool, run, tenant)
                    log.warning("gap_expired", pool=pool, run=run, tenant=tenant)
        return RENEW_S

    def _drive(self, pool: PoolId, base_model: str, tasks: asyncio.TaskGroup) -> None:
        """Start the tasks of a pool. A slow pool does not delay the others."""
        pool_scheduler = PoolScheduler(
            self._dispatch, self._settings, pool, gather_s=self._gather_s,
            quantum_tokens=self._quantum_tokens, base_model=base_model,
        )  # fmt: skip
        pool_scheduler.policy = self._policy
        woken = asyncio.Event()
        self._pools[pool] = pool_scheduler, woken
        scaling = PoolScaling(self._dispatch, pool, self._settings)

        async def tick() -> float:
            return await pool_scheduler.tick_now() if self._leads else RENEW_S

        async def scale() -> float:
            if self._leads:
                await scaling.decide(pool_scheduler.waiting_tokens, self._policy.pauses)
            else:
                scaling.forget()
            return DECIDE_EVERY_S

        tasks.create_task(self._repeat(woken, tick))
        tasks.create_task(self._repeat(self._stopped, scale))

    async def _listen(self) -> None:
        while True:
            try:
                async for wake in self._dispatch.wakes():
                    if wake is None:  # the subscription is new, and Redis may be another server
                        self._reload_queues()
                        self._wake_all()
                    elif wake.pool in self._pools:
                        pool_scheduler, woken = self._pools[wake.pool]
                        if pool_scheduler.is_woken_by(wake):
                            woken.set()
            except CONNECTION_LOST:
                await asyncio.sleep(_RETRY_S)

    def _reload_queues(self) -> None:
        for pool_scheduler, _ in self._pools.values():
            pool_scheduler.reload_queue()

    def _wake_all(self) -> None:
        for _, woken in self._pools.values():
            woken.set()
