"""The clocks on a store in memory and a time of their own: nothing here sleeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cotrain_scheduler import clock as clock_module
from cotrain_scheduler import host_time as host_time_module
from cotrain_scheduler import pool_clock as pool_clock_module
from cotrain_scheduler.clock import Clock
from cotrain_scheduler.cycle_start import GATHER_S
from cotrain_scheduler.pool_clock import LOOK_S, SWEEP_S, PoolClock
from cotrain_store.errors import Fenced, PlanOutdated
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue, Step
from cotrain_store.messages.pauses import Pause, Pauses, PlanPolicy
from cotrain_store.messages.queue_changes import QueueChanges, Wake
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.settings.scheduler import ClockMode, SchedulerSettings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cotrain_store.oplog.moves import Move

ConnectionLost = CONNECTION_LOST[0]
POOL, WORKER = PoolId("pool"), WorkerId("w0")
NOW = 1_000_000.0


class InMemory:
    """What a clock sees of the store: queues of whole ops, one worker, and the steps it was given."""

    def __init__(self) -> None:
        self.leads = True
        self.paused = PlanPolicy()
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
        self.read_all: list[int] = []
        self.read_runs: list[str] = []
        self.epoch = 0
        self.number = 0
        self.changed: dict[RunId, int] = {}
        self.wake: asyncio.Queue[Wake | None] = asyncio.Queue()

    def submit(
        self, run: str, kind: OpKind = OpKind.FORWARD_BACKWARD, *, is_noted: bool = True
    ) -> None:
        seq = sum(op.run == run for step in self.steps for op in step.ops) + len(self.queued[run])
        self.queued[run].append(QueuedOp(RunId(run), seq, kind, 10, "inline", 1, NOW))
        if is_noted:
            self.note(run)

    def note(self, run: str) -> None:
        self.number += 1
        self.changed.pop(RunId(run), None)
        self.changed[RunId(run)] = self.number

    def finish(self) -> None:
        self.open.clear()

    async def lead(self) -> bool:
        self.epoch = self.epoch or 1
        return self.leads

    async def pass_time(self) -> None:
        self.passed += 1

    async def resign(self) -> None:
        self.resigned = True

    async def policy(self) -> PlanPolicy:
        return self.paused

    async def base_model(self, pool: PoolId) -> str:
        return f"model of {pool}"

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

    @property
    def moves(self) -> InMemory:
        return self

    async def wanted(self, _: PoolId) -> list[Move]:
        return []

    async def open_steps(self, _: PoolId, worker: WorkerId) -> int:
        return sum(step.worker == worker for step in self.open)

    def queue(self, run: RunId) -> RunQueue:
        return RunQueue(run, TenantId(run[0]), None, tuple(self.queued[run]))

    async def ready(self, _: PoolId) -> list[RunQueue]:
        self.calls += 1
        self.read_all.append(len(self.steps))
        return [self.queue(RunId(run)) for run, ops in list(self.queued.items()) if ops]

    async def queues(self, _: PoolId, runs: Sequence[RunId]) -> list[RunQueue]:
        self.read_runs += runs
        return [self.queue(run) for run in runs]

    async def last_change(self, _: PoolId) -> int:
        return self.number

    async def changes(self, _: PoolId, since: int) -> QueueChanges:
        """Give two at once, so that whoever wants all asks again."""
        found = [run for run, number in self.changed.items() if number > since][:2]
        are_all = len(found) < 2
        number = self.number if are_all else self.changed[found[-1]]
        ready = sum(bool(ops) for ops in self.queued.values())
        return QueueChanges(number, [self.queue(run) for run in found], ready, are_all)

    async def last_cycle(self, _: PoolId) -> int:
        return len(self.steps)

    async def plan(self, _: PoolId, step: Step, __: int = 0) -> None:
        if self.outdated or any(op not in self.queued[op.run] for op in step.ops):
            self.outdated = max(0, self.outdated - 1)
            raise PlanOutdated
        for op in step.ops:
            self.queued[op.run].remove(op)
        self.steps.append(step)
        self.open.append(step)

    async def old_gaps(self, _: PoolId, __: float) -> list[tuple[RunId, TenantId]]:
        return self.gaps_of

    async def expire_gap(self, _: PoolId, run: RunId, __: TenantId) -> None:
        self.expired.append(run)

    async def wakes(self) -> AsyncIterator[Wake | None]:
        while True:
            yield await self.wake.get()


@pytest.fixture
def store() -> InMemory:
    return InMemory()


def settings_of(**settings: Any) -> SchedulerSettings:
    given = {"redis_url": "redis://", "data_dir": Path("/nowhere"), **settings}
    return SchedulerSettings.model_validate(given)


def pool_on(store: Any, *, gather_s: float = GATHER_S, **settings: Any) -> PoolClock:
    return PoolClock(store, settings_of(**settings), POOL, gather_s=gather_s)


async def test_a_single_tenant_never_waits_for_the_gather_window(store: InMemory) -> None:
    clock = pool_on(store, gather_s=1.0)
    now = NOW
    for _ in range(5):
        store.submit("alone")
        await clock.tick(now)
        assert len(store.open) == 1  # planned in the very tick that saw it
        now += 5.0
        store.finish()
        assert await clock.tick(now) == now + SWEEP_S
    assert [step.planned_at for step in store.steps] == [NOW + 5.0 * n for n in range(5)]


async def test_those_just_answered_are_waited_for_and_then_no_longer(store: InMemory) -> None:
    clock = pool_on(store, gather_s=0.02)
    for run in ("a", "b"):
        store.submit(run)
    await clock.tick(NOW)
    store.finish()
    store.submit("a")
    again = await clock.tick(NOW + 0.1)
    assert again == pytest.approx(NOW + 0.1 + 0.02)
    assert store.open == []
    store.submit("b")
    await clock.tick(NOW + 0.11)
    assert {op.run for op in store.steps[-1].ops} == {"a", "b"}
    store.finish()
    store.submit("a")
    await clock.tick(NOW + 0.2)
    await clock.tick(NOW + 0.2 + 0.03)
    assert {op.run for op in store.steps[-1].ops} == {"a"}


async def test_a_busy_worker_is_left_alone(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick(NOW)
    store.submit("b")
    assert await clock.tick(NOW + 100) == NOW + 100 + SWEEP_S
    assert len(store.steps) == 1


async def test_new_runs_go_to_the_emptiest_worker_and_each_gets_its_own_step(
    store: InMemory,
) -> None:
    store.workers = [WORKER, WorkerId("w1")]
    for run in ("a", "b", "c", "d"):
        store.submit(run)
    clock = pool_on(store)
    await clock.tick(NOW)
    assert [step.cycle for step in store.steps] == [1, 2]
    runs = [{op.run for op in step.ops} for step in store.steps]
    assert len(runs[0]) == len(runs[1]) == 2
    assert runs[0] | runs[1] == {"a", "b", "c", "d"}


async def test_a_save_without_room_holds_its_own_run_back_until_there_is_room(
    store: InMemory,
) -> None:
    clock = pool_on(store)
    store.takes_saves = False
    for kind in (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.FORWARD):
        store.submit("a", kind)
    store.submit("b")
    await clock.tick(NOW)
    assert [(op.run, op.seq) for op in store.steps[-1].ops] == [("a", 0), ("a", 1), ("b", 0)]
    store.finish()
    await clock.tick(NOW + 1)
    assert await clock.tick(NOW + 2) == NOW + 2 + SWEEP_S
    assert len(store.steps) == 1
    store.takes_saves = True
    await clock.tick(NOW + 3)
    assert [op.kind for op in store.steps[-1].ops] == [OpKind.SAVE]


async def test_nothing_is_planned_of_who_is_paused_and_it_keeps_its_turn(store: InMemory) -> None:
    clock = pool_on(store)
    clock.policy = PlanPolicy(pauses=Pauses({TenantId("a"): Pause(NOW)}))
    for run in ("a", "b"):
        store.submit(run)
    await clock.tick(NOW)
    assert {op.run for op in store.steps[-1].ops} == {"b"}
    store.finish()
    assert await clock.tick(NOW + 1) == NOW + 1 + SWEEP_S
    clock.policy = PlanPolicy()
    await clock.tick(NOW + 2)
    assert {op.run for op in store.steps[-1].ops} == {"a"}


async def test_a_worker_that_is_gone_for_long_loses_its_work_once(store: InMemory) -> None:
    clock = pool_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    for now in (NOW, NOW + 29.9):
        await clock.tick(now)
    assert store.reassigned == []
    await clock.tick(NOW + 30)
    await clock.tick(NOW + 31)
    assert store.reassigned == [("w1", WORKER)]


async def test_a_metronome_plans_on_the_beat_and_only_then(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    assert await clock.tick(NOW + 1) == NOW + 1 + LOOK_S
    assert await clock.tick(NOW + 9.5) == NOW + 10
    assert store.steps == []
    await clock.tick(NOW + 10.01)
    assert [step.planned_at for step in store.steps] == [NOW + 10.01]


@pytest.mark.parametrize(("submits_whole_steps", "cycles"), [(False, 2), (True, 1)])
async def test_a_metronome_takes_one_cycle_for_a_whole_step_and_two_for_a_naive_one(
    store: InMemory, submits_whole_steps: bool, cycles: int
) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    steps, now = 3, NOW
    todo = [OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP] * steps
    while todo:
        for _ in range(2 if submits_whole_steps else 1):
            store.submit("a", todo.pop(0))
        now += 10
        await clock.tick(now + 0.01)
        assert store.queued["a"] == []
        store.finish()
    assert len(store.steps) == steps * cycles


async def test_a_queue_that_changed_is_read_again_soon_within_the_same_beat(
    store: InMemory,
) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    store.outdated = 1
    again = await clock.tick(NOW + 10.01)
    assert NOW + 10.01 < again < NOW + 10.1
    await clock.tick(again)
    assert len(store.steps) == 1


async def test_a_queue_that_never_settles_is_not_spun_on(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    store.outdated = 10**9
    assert await clock.tick(NOW) > NOW


def wake(worker: str | None = None, *, is_free: bool = False) -> Wake:
    return Wake(POOL, WorkerId(worker) if worker else None, is_free)


async def test_requests_that_nobody_can_run_yet_wake_nobody(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick(NOW)
    assert not clock.is_woken_by(wake("w0"))
    assert not clock.is_woken_by(wake())
    assert clock.is_woken_by(wake(is_free=True))


async def test_an_idle_worker_is_not_woken_for_the_runs_of_a_busy_one(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick(NOW)
    store.workers = [WORKER, WorkerId("w1")]
    await clock.tick(NOW + 1)
    assert not clock.is_woken_by(wake("w0"))
    for worker in ("w1", None, "one that was struck off"):
        assert clock.is_woken_by(wake(worker))


async def test_a_metronome_is_woken_by_nothing(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME)
    assert not clock.is_woken_by(wake(is_free=True))


async def test_a_request_that_comes_during_a_tick_wakes_the_next_one(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = pool_on(store)
    woken = []

    async def slots_a_moment_later(pool: PoolId) -> list[WorkerSlot]:
        woken.append(clock.is_woken_by(wake("w0")))
        return await InMemory.worker_slots(store, pool)

    monkeypatch.setattr(store, "worker_slots", slots_a_moment_later)
    store.submit("a")
    await clock.tick(NOW)
    store.submit("a")
    await clock.tick(NOW + 1)
    assert woken == [True, True]


async def test_the_queue_is_read_once_and_then_what_changed(store: InMemory) -> None:
    clock = pool_on(store)
    for number in range(6):
        for run in ("a", "b", "c"):
            store.submit(run)
        await clock.tick(NOW + number)
        store.finish()
    assert [len(step.ops) for step in store.steps] == [3] * 6
    assert (store.read_all, store.read_runs) == ([0], [])


async def test_everything_is_read_again_once_something_may_have_been_missed(
    store: InMemory,
) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    clock.forget_queue()
    assert clock.is_woken_by(wake("w0"))
    store.submit("a")
    await clock.tick(NOW + 1)
    assert (len(store.read_all), len(store.steps)) == (2, 1)


async def test_a_queue_that_is_forgotten_while_it_is_read_is_read_again(store: InMemory) -> None:
    """A lost connection of the listener, while a tick waits for what changed."""
    clock = pool_on(store)
    read = store.changes

    async def forget_and_read(pool: PoolId, since: int) -> QueueChanges:
        clock.forget_queue()
        return await read(pool, since)

    store.changes = forget_and_read  # type: ignore[method-assign, assignment]
    await clock.tick(NOW)
    store.changes = read  # type: ignore[method-assign]
    await clock.tick(NOW + 1)
    assert len(store.read_all) == 2


async def test_a_change_that_nothing_notes_is_found_by_counting(store: InMemory) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    store.submit("a", is_noted=False)
    await clock.tick(NOW + SWEEP_S)
    await clock.tick(NOW + 2 * SWEEP_S)
    assert (len(store.read_all), len(store.steps)) == (2, 1)


async def test_a_run_that_is_not_as_it_was_read_is_read_again_alone(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    store.submit("b")
    await clock.tick(NOW)
    store.finish()
    store.submit("a")
    store.submit("b")
    await clock.tick(NOW + 1)
    store.finish()
    store.submit("a")
    store.outdated = 1
    await clock.tick(NOW + 2)  # sees the end of the cycle, and waits for "b" for a moment
    again = await clock.tick(NOW + 3)
    await clock.tick(again)
    assert {op.run for op in store.steps[-1].ops} == {"a"}
    assert (store.read_all, store.read_runs) == ([0], ["a"])


async def test_a_redis_that_lost_what_it_knew_is_read_from_the_start(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick(NOW)
    store.finish()
    store.number = 0
    store.changed.clear()
    await clock.tick(NOW + 1)
    store.submit("b")
    await clock.tick(NOW + 2)
    assert {op.run for op in store.steps[-1].ops} == {"b"}


async def test_a_worker_that_comes_back_has_its_runs_again(store: InMemory) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    store.workers = [WORKER, WorkerId("w1")]
    await clock.tick(NOW + 1)
    store.workers = [WORKER]
    await clock.tick(NOW + 2)
    assert len(store.read_all) == 2  # for a worker more, not for one less
    store.workers = [WORKER, WorkerId("w1")]
    await clock.tick(NOW + 3)
    assert len(store.read_all) == 3


def process_on(store: Any, **settings: Any) -> Clock:
    return Clock(store, settings_of(**settings))


@contextlib.asynccontextmanager
async def running(clock: Clock) -> AsyncIterator[None]:
    """Let a process run, and stop as by a signal."""
    task = asyncio.create_task(clock.run())
    async with asyncio.timeout(120):
        yield
        clock.stop()
        await task


async def test_a_scheduler_that_does_not_lead_touches_nothing_until_it_does(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "RENEW_S", 0.0)
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


async def test_old_gaps_are_given_up_again_and_again(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "RENEW_S", 0.0)
    monkeypatch.setattr(clock_module, "GAPS_S", 0.0)
    store.gaps_of = [(RunId("a"), TenantId("t"))]
    async with running(process_on(store)):
        await until(lambda: len(store.expired) >= 2, 0.0)
    assert set(store.expired) == {"a"}


async def test_a_process_hears_that_its_worker_is_free(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_clock_module, "SWEEP_S", 600.0)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
        store.finish()
        store.submit("a")
        store.wake.put_nowait(wake(is_free=True))
        await until(lambda: len(store.steps) == 2, 0.0)


async def test_who_listens_anew_reads_everything(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_clock_module, "SWEEP_S", 600.0)
    async with running(process_on(store)):
        await until(lambda: store.read_all != [], 0.0)
        before = len(store.read_all)
        store.wake.put_nowait(None)
        await until(lambda: len(store.read_all) == before + 1, 0.0)


async def test_a_pool_that_takes_its_time_does_not_hold_up_another(
    store: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def two_pools() -> list[PoolId]:
        return [PoolId("slow"), POOL]

    async def slots(pool: PoolId) -> list[WorkerSlot]:
        if pool != POOL:
            await never.wait()
        return await InMemory.worker_slots(store, pool)

    monkeypatch.setattr(store, "pools", two_pools)
    monkeypatch.setattr(store, "worker_slots", slots)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
        never.set()


@pytest.mark.parametrize("trouble", [ConnectionLost("gone"), Fenced()])
async def test_trouble_of_one_tick_is_a_pause_and_the_queue_is_read_anew(
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

    monkeypatch.setattr(clock_module, "RENEW_S", 0.0)
    monkeypatch.setattr(store, "plan", fails_once)
    monkeypatch.setattr(store, "lead", lead_with_a_new_epoch)
    store.submit("a")
    async with running(process_on(store)):
        await until(lambda: len(store.steps) == 1, 0.0)
    assert len(store.read_all) >= 2
    assert store.resigned


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
    monkeypatch.setattr(host_time_module, "time", host_time)
    return host_time


@pytest.mark.parametrize("set_by", [-3600.0, -10.0, 3600.0])
async def test_nobody_waits_for_a_time_that_was_set_back(
    store: InMemory, host_time: HostTime, set_by: float
) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.look()
    host_time.pass_by(0.5)
    store.finish()
    await clock.look()  # sees the end of the cycle
    host_time.pass_by(0.01, set_by=set_by)
    store.submit("b")  # and nothing of those just answered
    await clock.look()
    assert {op.run for op in store.steps[-1].ops} == {"b"}


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
async def test_a_metronome_goes_on_with_the_next_beat_of_a_time_that_was_set(
    store: InMemory, host_time: HostTime, set_by: float
) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    await clock.look()
    host_time.pass_by(1, set_by=set_by)
    store.submit("a")
    await clock.look()
    assert store.steps == []
    host_time.pass_by(10)
    await clock.look()
    assert len(store.steps) == 1


async def test_nobody_is_dead_for_long_because_the_time_was_set(
    store: InMemory, host_time: HostTime
) -> None:
    clock = pool_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    await clock.look()
    host_time.pass_by(1, set_by=3600.0)
    await clock.look()
    host_time.pass_by(29)
    await clock.look()
    assert store.reassigned == []
    host_time.pass_by(1)
    await clock.look()
    assert store.reassigned == [("w1", WORKER)]
