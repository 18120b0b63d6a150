"""The clock on a store in memory and a time of its own: nothing here sleeps."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cotrain_scheduler import clock as clock_module
from cotrain_scheduler.clock import RENEW_S, SWEEP_S, Clock
from cotrain_scheduler.cycle_start import GATHER_S
from cotrain_store.errors import Fenced, PlanOutdated
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue, Step
from cotrain_store.settings.scheduler import ClockMode, SchedulerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POOL, WORKER = PoolId("pool"), WorkerId("w0")
NOW = 1_000_000.0


class InMemory:
    """What a clock sees of the store: queues of whole ops, one worker, and the steps it was given."""

    def __init__(self) -> None:
        self.leads = True
        self.queued: defaultdict[str, list[QueuedOp]] = defaultdict(list)
        self.steps: list[Step] = []
        self.open: list[Step] = []
        self.outdated = 0
        self.gaps_of: list[tuple[RunId, TenantId]] = []
        self.expired: list[RunId] = []
        self.resigned = False
        self.workers = [WORKER]
        self.takes_saves = True
        self.dead: list[WorkerId] = []
        self.reassigned: list[tuple[WorkerId, WorkerId]] = []
        self.calls = self.passed = 0
        self.wake: asyncio.Queue[bool] = asyncio.Queue()

    def submit(self, run: str, kind: OpKind = OpKind.FORWARD_BACKWARD) -> None:
        seq = sum(op.run == run for step in self.steps for op in step.ops) + len(self.queued[run])
        self.queued[run].append(QueuedOp(RunId(run), seq, kind, 10, "inline", 1, NOW))

    def finish(self) -> None:
        self.open.clear()

    async def lead(self) -> bool:
        return self.leads

    async def pass_time(self) -> None:
        self.passed += 1

    async def resign(self) -> None:
        self.resigned = True

    async def pools(self) -> list[PoolId]:
        return [POOL]

    async def worker_slots(self, _: PoolId) -> list[WorkerSlot]:
        room = self.takes_saves
        beats = [
            WorkerHeartbeat(w, 1, "serving", "cpu", 1e4, 0, 0, NOW, takes_saves=room)
            for w in self.workers
        ]
        return [WorkerSlot(beat.id, 1, beat) for beat in beats] + [
            WorkerSlot(w, 1, None) for w in self.dead
        ]

    async def reassign(self, _: PoolId, dead: WorkerSlot, successor: WorkerId) -> bool:
        self.dead.remove(dead.worker)
        self.reassigned.append((dead.worker, successor))
        return True

    async def open_steps(self, _: PoolId, worker: WorkerId) -> int:
        return sum(step.worker == worker for step in self.open)

    async def ready(self, _: PoolId) -> list[RunQueue]:
        self.calls += 1
        return [
            RunQueue(RunId(run), TenantId(run[0]), None, tuple(ops))
            for run, ops in self.queued.items()
            if ops
        ]

    async def last_cycle(self, _: PoolId) -> int:
        return len(self.steps)

    async def plan(self, _: PoolId, step: Step) -> None:
        if self.outdated:
            self.outdated -= 1
            raise PlanOutdated
        for op in step.ops:
            self.queued[op.run].remove(op)
        self.steps.append(step)
        self.open.append(step)

    async def old_gaps(self, _: PoolId, __: float) -> list[tuple[RunId, TenantId]]:
        return self.gaps_of

    async def expire_gap(self, _: PoolId, run: RunId, __: TenantId) -> None:
        self.expired.append(run)

    async def wakes(self) -> AsyncIterator[bool]:
        while True:
            yield await self.wake.get()


@pytest.fixture
def store() -> InMemory:
    return InMemory()


def clock_on(store: Any, *, gather_s: float = GATHER_S, **settings: Any) -> Clock:
    given = {"redis_url": "redis://", "data_dir": Path("/nowhere"), **settings}
    return Clock(store, SchedulerSettings.model_validate(given), gather_s=gather_s)


async def test_a_single_tenant_never_waits_for_the_gather_window(store: InMemory) -> None:
    clock = clock_on(store, gather_s=1.0)
    now = NOW
    for _ in range(5):
        store.submit("alone")
        await clock._tick(now)
        assert len(store.open) == 1  # planned in the very tick that saw it
        now += 5.0
        store.finish()
        assert await clock._tick(now) == now + SWEEP_S
    assert [step.planned_at for step in store.steps] == [NOW + 5.0 * n for n in range(5)]


async def test_those_just_answered_are_waited_for_and_then_no_longer(store: InMemory) -> None:
    clock = clock_on(store, gather_s=0.02)
    for run in ("a", "b"):
        store.submit(run)
    await clock._tick(NOW)
    store.finish()
    store.submit("a")
    again = await clock._tick(NOW + 0.1)
    assert again == pytest.approx(NOW + 0.1 + 0.02)
    assert store.open == []
    store.submit("b")
    await clock._tick(NOW + 0.11)
    assert {op.run for op in store.steps[-1].ops} == {"a", "b"}
    store.finish()
    store.submit("a")
    await clock._tick(NOW + 0.2)
    await clock._tick(NOW + 0.2 + 0.03)
    assert {op.run for op in store.steps[-1].ops} == {"a"}


async def test_a_busy_worker_is_left_alone(store: InMemory) -> None:
    clock = clock_on(store)
    store.submit("a")
    await clock._tick(NOW)
    store.submit("b")
    assert await clock._tick(NOW + 100) == NOW + 100 + SWEEP_S
    assert len(store.steps) == 1


async def test_new_runs_go_to_the_emptiest_worker_and_each_gets_its_own_step(
    store: InMemory,
) -> None:
    store.workers = [WORKER, WorkerId("w1")]
    for run in ("a", "b", "c", "d"):
        store.submit(run)
    clock = clock_on(store)
    await clock._tick(NOW)
    assert [step.cycle for step in store.steps] == [1, 2]
    runs = [{op.run for op in step.ops} for step in store.steps]
    assert len(runs[0]) == len(runs[1]) == 2
    assert runs[0] | runs[1] == {"a", "b", "c", "d"}


async def test_a_save_without_room_holds_its_own_run_back_until_there_is_room(
    store: InMemory,
) -> None:
    clock = clock_on(store)
    store.takes_saves = False
    for kind in (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.FORWARD):
        store.submit("a", kind)
    store.submit("b")
    await clock._tick(NOW)
    assert [(op.run, op.seq) for op in store.steps[-1].ops] == [("a", 0), ("a", 1), ("b", 0)]
    store.finish()
    await clock._tick(NOW + 1)
    assert await clock._tick(NOW + 2) == NOW + 2 + SWEEP_S
    assert len(store.steps) == 1
    store.takes_saves = True
    await clock._tick(NOW + 3)
    assert [op.kind for op in store.steps[-1].ops] == [OpKind.SAVE]


async def test_a_worker_that_is_gone_for_long_loses_its_work_once(store: InMemory) -> None:
    clock = clock_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    for now in (NOW, NOW + 29.9):
        await clock._tick(now)
    assert store.reassigned == []
    await clock._tick(NOW + 30)
    await clock._tick(NOW + 31)
    assert store.reassigned == [("w1", WORKER)]


async def test_a_metronome_plans_on_the_beat_and_only_then(store: InMemory) -> None:
    clock = clock_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    assert await clock._tick(NOW + 1) == NOW + 1 + RENEW_S
    assert await clock._tick(NOW + 9.5) == NOW + 10
    assert store.steps == []
    await clock._tick(NOW + 10.01)
    assert [step.planned_at for step in store.steps] == [NOW + 10.01]


@pytest.mark.parametrize(("submits_whole_steps", "cycles"), [(False, 2), (True, 1)])
async def test_a_metronome_takes_one_cycle_for_a_whole_step_and_two_for_a_naive_one(
    store: InMemory, submits_whole_steps: bool, cycles: int
) -> None:
    clock = clock_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    steps, now = 3, NOW
    todo = [OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP] * steps
    while todo:
        for _ in range(2 if submits_whole_steps else 1):
            store.submit("a", todo.pop(0))
        now += 10
        await clock._tick(now + 0.01)
        assert store.queued["a"] == []
        store.finish()
    assert len(store.steps) == steps * cycles


async def test_a_queue_that_changed_is_read_again_soon_within_the_same_beat(
    store: InMemory,
) -> None:
    clock = clock_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    store.outdated = 1
    again = await clock._tick(NOW + 10.01)
    assert NOW + 10.01 < again < NOW + 10.1
    await clock._tick(again)
    assert len(store.steps) == 1


async def test_a_queue_that_never_settles_is_not_spun_on(store: InMemory) -> None:
    clock = clock_on(store)
    store.submit("a")
    store.outdated = 10**9
    assert await clock._tick(NOW) > NOW


async def test_a_scheduler_that_does_not_lead_touches_nothing(store: InMemory) -> None:
    store.leads = False
    store.submit("a")
    clock = clock_on(store)
    assert await clock._tick(NOW) == NOW + RENEW_S
    assert (store.steps, store.calls) == ([], 0)
    store.leads = True
    await clock._tick(NOW + 0.01)  # it asks again at every wake
    assert len(store.steps) == 1


async def test_old_gaps_are_given_up(store: InMemory) -> None:
    store.gaps_of = [(RunId("a"), TenantId("t"))]
    clock = clock_on(store)
    await clock._tick(NOW)
    await clock._tick(NOW + clock_module.GAPS_S / 2)
    assert store.expired == ["a"]
    await clock._tick(NOW + clock_module.GAPS_S + 1)
    assert store.expired == ["a", "a"]


async def test_a_wake_during_a_tick_is_not_lost(store: InMemory) -> None:
    clock = clock_on(store)
    await clock._tick(NOW)
    clock._woken.set()
    async with asyncio.timeout(120):
        await clock._sleep(time.monotonic() + 600)


async def heard(store: InMemory, is_free: bool) -> None:
    """Have a listening clock hear a message."""
    store.wake.put_nowait(is_free)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_that_nobody_can_run_yet_wake_nobody(store: InMemory) -> None:
    clock = clock_on(store)
    listening = asyncio.create_task(clock._listen())
    store.submit("a")
    await clock._tick(NOW)
    await heard(store, is_free=False)
    assert not clock._woken.is_set()
    await heard(store, is_free=True)
    assert clock._woken.is_set()
    listening.cancel()


async def test_a_request_that_comes_while_a_tick_reads_the_queue_is_not_lost(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = clock_on(store)
    listening = asyncio.create_task(clock._listen())
    store.submit("a")
    await clock._tick(NOW)
    store.finish()

    async def ready_just_before(pool: PoolId) -> list[RunQueue]:
        found = await InMemory.ready(store, pool)
        store.submit("a")
        await heard(store, is_free=False)
        return found

    monkeypatch.setattr(store, "ready", ready_just_before)
    await clock._tick(NOW + 1)
    assert clock._woken.is_set()
    listening.cancel()


@dataclass
class HostTime:
    """A host's two clocks: somebody sets the one, and the other only ever goes on."""

    wall_s: float = NOW
    steady_s: float = 5_000.0

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.steady_s

    def pass_by(self, seconds: float, *, set_by: float = 0.0) -> None:
        self.steady_s += seconds
        self.wall_s += seconds + set_by


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> HostTime:
    host_time = HostTime()
    monkeypatch.setattr(clock_module, "time", host_time)
    return host_time


@pytest.mark.parametrize("set_by", [-3600.0, -10.0, 3600.0])
async def test_nobody_waits_for_a_time_that_was_set_back(
    store: InMemory, host_time: HostTime, set_by: float
) -> None:
    clock = clock_on(store)
    store.submit("a")
    await clock._tick(clock._now())
    host_time.pass_by(0.5)
    store.finish()
    await clock._tick(clock._now())  # sees the end of the cycle
    host_time.pass_by(0.01, set_by=set_by)
    store.submit("b")  # and nothing of those just answered
    await clock._tick(clock._now())
    assert {op.run for op in store.steps[-1].ops} == {"b"}


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
async def test_a_metronome_goes_on_with_the_next_beat_of_a_time_that_was_set(
    store: InMemory, host_time: HostTime, set_by: float
) -> None:
    clock = clock_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    await clock._tick(clock._now())
    host_time.pass_by(1, set_by=set_by)
    store.submit("a")
    await clock._tick(clock._now())
    assert store.steps == []
    host_time.pass_by(10)
    await clock._tick(clock._now())
    assert len(store.steps) == 1


async def test_nobody_is_dead_for_long_because_the_time_was_set(
    store: InMemory, host_time: HostTime
) -> None:
    clock = clock_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    await clock._tick(clock._now())
    host_time.pass_by(1, set_by=3600.0)
    await clock._tick(clock._now())
    host_time.pass_by(29)
    await clock._tick(clock._now())
    assert store.reassigned == []
    host_time.pass_by(1)
    await clock._tick(clock._now())
    assert store.reassigned == [("w1", WORKER)]


async def test_the_lease_is_renewed_whatever_the_time_is_set_to(
    store: InMemory, host_time: HostTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def lead() -> bool:
        asked.append(host_time.steady_s)
        return True

    monkeypatch.setattr(store, "lead", lead)
    clock = clock_on(store)
    for set_by in (0.0, -3600.0, 0.0):
        await clock._tick(clock._now())
        host_time.pass_by(RENEW_S + 0.1, set_by=set_by)
    assert len(asked) == 3


async def test_a_clock_that_stops_gives_its_lease_back(store: InMemory) -> None:
    clock = clock_on(store)
    running = asyncio.create_task(clock.run())
    await asyncio.sleep(0)
    clock.stop()
    async with asyncio.timeout(120):
        await running
    assert store.resigned


async def test_a_replaced_clock_stands_by_and_leads_again_when_it_may(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, asked, is_planned = store.plan, [], asyncio.Event()

    async def fenced_once(*call: Any) -> Any:
        asked.append(call)
        if len(asked) == 1:
            raise Fenced
        is_planned.set()
        return await plan(*call)

    monkeypatch.setattr(clock_module, "RENEW_S", 0.0)
    monkeypatch.setattr(store, "plan", fenced_once)
    store.submit("a")
    clock = clock_on(store)
    running = asyncio.create_task(clock.run())
    async with asyncio.timeout(120):
        await is_planned.wait()
        clock.stop()
        await running
    assert len(store.steps) == 1
    assert store.resigned
