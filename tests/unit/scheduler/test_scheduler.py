"""Scheduler process that becomes leader and ticks its pools, on a store in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cotrain_scheduler import pool_scheduler as pool_scheduler_module
from cotrain_scheduler import scheduler as scheduler_module
from cotrain_scheduler.scheduler import Scheduler
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import PoolId, RunId, TenantId
from cotrain_store.messages.ops import PoolView
from cotrain_store.redis_client.connection import CONNECTION_LOST
from tests.support.pool_in_memory import POOL, InMemory, settings_of, wake
from tests.support.waiting import until

ConnectionLost = CONNECTION_LOST[0]


@pytest.fixture
def store() -> InMemory:
    return InMemory()


def process_on(store: Any, **settings: Any) -> Scheduler:
    return Scheduler(store, settings_of(**settings))


@contextlib.asynccontextmanager
async def running(clock: Scheduler) -> AsyncIterator[None]:
    """Run a process, and stop it as a signal does."""
    task = asyncio.create_task(clock.run())
    async with asyncio.timeout(120):
        yield
        clock.stop()
        await task


async def test_a_scheduler_writes_nothing_until_it_is_leader(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "RENEW_S", 0.0)
    asked: list[bool] = []

    async def lead() -> bool:
        asked.append(store.leads)
        assert (store.steps, store.calls) == ([], 0) or store.leads
        return store.leads

    monkeypatch.setattr(store, "lead", lead)
    store.leads = False
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(asked) > 3, 0.0)
        store.leads = True
        await until(lambda: len(store.steps) == 1, 0.0)


async def test_old_gaps_are_expired_repeatedly(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "RENEW_S", 0.0)
    monkeypatch.setattr(scheduler_module, "GAPS_S", 0.0)
    store.gaps_of = [(RunId("a"), TenantId("t"))]
    async with running(process_on(store)):
        await until(lambda: len(store.expired) >= 2, 0.0)
    assert set(store.expired) == {"a"}


async def test_a_process_is_notified_that_its_worker_is_free(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_scheduler_module, "SWEEP_S", 600.0)
    monkeypatch.setattr(pool_scheduler_module, "IDLE_SWEEP_S", 600.0)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
        store.finish()
        store.submit("a")
        store.wake.put_nowait(wake(is_free=True))
        await until(lambda: len(store.steps) == 2, 0.0)


async def test_many_notifications_cause_few_ticks(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MIN_TICK_S", 0.05)
    ticks = list[float]()

    async def view(*read: Any) -> PoolView:
        ticks.append(asyncio.get_running_loop().time())
        return await InMemory.view(store, *read)

    monkeypatch.setattr(store, "view", view)
    async with running(process_on(store)):
        await until(lambda: ticks != [], 0.0)
        for _ in range(100):
            store.wake.put_nowait(wake(is_free=True))
            await asyncio.sleep(0.001)
        assert len(ticks) <= 2 * (1 + (ticks[-1] - ticks[0]) / 0.05)


async def test_a_new_subscription_reads_the_whole_queue(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_scheduler_module, "SWEEP_S", 600.0)
    monkeypatch.setattr(pool_scheduler_module, "IDLE_SWEEP_S", 600.0)
    async with running(process_on(store)):
        await until(lambda: store.read_all != [], 0.0)
        before = len(store.read_all)
        store.wake.put_nowait(None)
        await until(lambda: len(store.read_all) == before + 1, 0.0)


async def test_a_slow_pool_does_not_delay_another(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()

    async def two_pools() -> list[PoolId]:
        return [PoolId("slow"), POOL]

    async def view(pool: PoolId, *read: Any) -> PoolView:
        if pool != POOL:
            await never.wait()
        return await InMemory.view(store, pool, *read)

    monkeypatch.setattr(store, "pools", two_pools)
    monkeypatch.setattr(store, "view", view)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
        never.set()


@pytest.mark.parametrize("trouble", [ConnectionLost("gone"), Fenced()])
async def test_an_error_of_one_tick_is_retried_after_reading_the_queue_again(
    store: InMemory, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    plan, asked = store.plan, []

    async def fails_once(*call: Any) -> Any:
        asked.append(call)
        if len(asked) == 1:
            raise trouble
        return await plan(*call)

    async def lead_with_a_new_epoch() -> bool:
        store.epoch = 1 + len(asked)
        return True

    monkeypatch.setattr(scheduler_module, "RENEW_S", 0.0)
    monkeypatch.setattr(store, "plan", fails_once)
    monkeypatch.setattr(store, "lead", lead_with_a_new_epoch)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
    assert len(store.read_all) >= 2
    assert store.resigned


async def test_a_scheduler_publishes_scaling_and_continues_from_its_record(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "DECIDE_EVERY_S", 0.0)
    store.workers = []
    async with running(process_on(store, workers_min=0)):
        await until(lambda: store.scaling is not None, 0.0)
        assert store.scaling is not None
        assert store.scaling.wanted == 0
        store.submit("a")
        await until(lambda: store.scaling is not None and store.scaling.wanted == 1, 0.0)
    store.queued.clear()
    before = store.scaling
    async with running(process_on(store, workers_min=0)):
        await until(lambda: store.scaling is not before, 0.0)
    assert store.scaling.wanted == 1


async def test_a_standby_scheduler_publishes_no_scaling(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "DECIDE_EVERY_S", 0.0)
    monkeypatch.setattr(scheduler_module, "RENEW_S", 0.0)
    async with running(process_on(store)):
        await until(lambda: store.scaling is not None, 0.0)
        store.leads = False
        await until(lambda: store.passed > 0, 0.0)
        await asyncio.sleep(0.05)
        store.scaling = None
        await asyncio.sleep(0.05)
    assert store.scaling is None
