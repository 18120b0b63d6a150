"""Scheduler of one pool, on a store in memory and a simulated time: nothing here sleeps.

A change of the host's time of day while a scheduler runs does not affect its clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cotrain_scheduler import pool_scheduler as host_time_module
from cotrain_scheduler.pool_scheduler import CLOCK_CHECK_S, IDLE_SWEEP_S, SWEEP_S
from cotrain_scheduler.queue import Waiting, exclude_paused
from cotrain_store.messages.fleet import Pause, Pauses, PlanPolicy
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, PoolView, QueuedOp, RunQueue
from cotrain_store.settings import ClockMode
from tests.support.pool_in_memory import NOW, TOKENS_PER_S, WORKER, InMemory, pool_on, wake


@pytest.fixture
def store() -> InMemory:
    return InMemory()


async def test_a_single_tenant_never_waits_for_the_gather_window(store: InMemory) -> None:
    clock = pool_on(store, gather_s=1.0)
    now = NOW
    for _ in range(5):
        store.submit("alone")
        await clock.tick(now)
        assert len(store.open) == 1  # planned in the same tick
        now += 5.0
        store.finish()
        assert await clock.tick(now) == now + IDLE_SWEEP_S
    assert [step.planned_at for step in store.steps] == [NOW + 5.0 * n for n in range(5)]


async def test_runs_just_answered_are_waited_for_only_within_the_window(store: InMemory) -> None:
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


async def test_runs_that_missed_a_cycle_are_waited_for_until_they_stay_away(store: InMemory) -> None:
    clock = pool_on(store, gather_s=0.005)
    for run in ("a", "b", "c"):  # c is always waiting
        store.submit(run)
    await clock.tick(NOW)

    async def ends(at: float, *returns: tuple[str, float]) -> set[str]:
        """End the open step, with c waiting and others returning later. Return the runs in the next step."""
        store.finish()
        store.submit("c", at=at - 1)
        again = await clock.tick(at)
        for run, delay_s in [*returns, ("", 60.0)]:
            while not store.open and again < at + delay_s:
                again = await clock.tick(again)
            if run:
                store.submit(run, at=at + delay_s)
                again = again if store.open else await clock.tick(at + delay_s)
        return {str(op.run) for op in store.steps[-1].ops}

    came = [("a", 0.1), ("b", 0.2)]
    assert await ends(NOW + 10.0, *came) == {"c"}  # their return times are unknown
    assert await ends(NOW + 20.0) == {"a", "b", "c"}  # both returned while that ran
    assert await ends(NOW + 30.0, *came) == {"a", "b", "c"}
    assert await ends(NOW + 40.0, *came) == {"a", "b", "c"}
    assert clock._worker_states[WORKER].return_s == pytest.approx(0.2)
    for cycle in range(8):  # both have left
        assert await ends(NOW + 50.0 + 10 * cycle) == {"c"}
    assert clock._worker_states[WORKER].return_s < 0.001


async def test_a_busy_worker_gets_no_step(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick(NOW)
    store.submit("b")
    assert await clock.tick(NOW + 100) == NOW + 100 + SWEEP_S
    assert len(store.steps) == 1


async def test_new_runs_go_to_the_least_loaded_worker_in_separate_steps(store: InMemory) -> None:
    store.workers = [WORKER, WorkerId("w1")]
    for run in ("a", "b", "c", "d"):
        store.submit(run)
    clock = pool_on(store)
    await clock.tick(NOW)
    assert [step.cycle for step in store.steps] == [1, 2]
    runs = [{op.run for op in step.ops} for step in store.steps]
    assert len(runs[0]) == len(runs[1]) == 2
    assert runs[0] | runs[1] == {"a", "b", "c", "d"}


async def test_a_save_without_free_memory_delays_only_its_own_run(store: InMemory) -> None:
    clock = pool_on(store)
    store.accepts_saves = False
    for kind in (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.FORWARD):
        store.submit("a", kind)
    store.submit("b")
    await clock.tick(NOW)
    assert [op.id for op in store.steps[-1].ops] == [("a", 0), ("a", 1), ("b", 0)]
    store.finish()
    await clock.tick(NOW + 1)
    assert await clock.tick(NOW + 2) == NOW + 2 + SWEEP_S
    assert len(store.steps) == 1
    store.accepts_saves = True
    await clock.tick(NOW + 3)
    assert [op.kind for op in store.steps[-1].ops] == [OpKind.SAVE]


async def test_paused_runs_are_not_planned_and_keep_their_turn(store: InMemory) -> None:
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


async def test_a_worker_missing_for_long_is_reassigned_once(store: InMemory) -> None:
    clock = pool_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    for now in (NOW, NOW + 29.9):
        await clock.tick(now)
    assert store.reassigned == []
    await clock.tick(NOW + 30)
    await clock.tick(NOW + 31)
    assert store.reassigned == [("w1", WORKER)]


async def test_a_metronome_plans_only_at_its_beats(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    assert await clock.tick(NOW + 1) == NOW + 1 + CLOCK_CHECK_S
    assert await clock.tick(NOW + 9.5) == NOW + 10
    assert store.steps == []
    await clock.tick(NOW + 10.01)
    assert [step.planned_at for step in store.steps] == [NOW + 10.01]


async def test_a_metronome_waits_at_its_beat_for_no_run_of_the_last_cycle(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10, gather_s=5.0)
    for run in ("a", "b"):
        store.submit(run)
    await clock.tick(NOW + 10.01)
    store.finish()
    store.submit("a")
    await clock.tick(NOW + 20.01)
    assert [{op.run for op in step.ops} for step in store.steps] == [{"a", "b"}, {"a"}]


@pytest.mark.parametrize(("submits_whole_steps", "cycles"), [(False, 2), (True, 1)])
async def test_a_metronome_needs_one_cycle_for_a_whole_step_and_two_for_parts(
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


@pytest.mark.parametrize(("mode", "limit_s"), [(ClockMode.EAGER, 0.4), (ClockMode.METRONOME, 1.0)])
async def test_a_step_has_the_work_and_the_time_of_one_period(store: InMemory, mode: ClockMode, limit_s: float) -> None:
    clock = pool_on(store, clock_mode=mode, clock_period_s=1)
    for _ in range(600):
        store.submit("a")
        store.submit("b")
    await clock.tick(NOW)
    (step,) = store.steps
    assert step.limit_s == limit_s
    assert sum(op.tokens for op in step.ops) == limit_s * TOKENS_PER_S


async def test_a_changed_queue_is_read_again_within_the_same_beat(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    clock._last_period = int(NOW // 10)
    store.submit("a")
    store.outdated = 1
    again = await clock.tick(NOW + 10.01)
    assert NOW + 10.01 < again < NOW + 10.1
    await clock.tick(again)
    assert len(store.steps) == 1


async def test_a_queue_that_always_changes_is_not_read_in_a_loop(store: InMemory) -> None:
    clock = pool_on(store)
    store.submit("a")
    store.outdated = 10**9
    assert await clock.tick(NOW) > NOW


async def test_requests_that_no_worker_can_run_wake_no_worker(store: InMemory) -> None:
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


async def test_a_metronome_ignores_wakes(store: InMemory) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME)
    assert not clock.is_woken_by(wake(is_free=True))


async def test_a_request_during_a_tick_wakes_the_next_one(store: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = pool_on(store)
    woken = []

    async def a_moment_later(pool: PoolId, *read: Any) -> PoolView:
        woken.append(clock.is_woken_by(wake("w0")))
        return await InMemory.view(store, pool, *read)

    monkeypatch.setattr(store, "view", a_moment_later)
    store.submit("a")
    await clock.tick(NOW)
    store.submit("a")
    await clock.tick(NOW + 1)
    assert woken == [True] * 3  # the first tick also reads the whole queue


async def test_the_queue_is_read_once_and_afterwards_only_its_changes(store: InMemory) -> None:
    clock = pool_on(store)
    for number in range(6):
        for run in ("a", "b", "c"):
            store.submit(run)
        await clock.tick(NOW + number)
        store.finish()
    assert [len(step.ops) for step in store.steps] == [3] * 6
    assert (store.read_all, store.read_runs) == ([0], [])


async def test_the_whole_queue_is_read_again_after_a_missed_change(store: InMemory) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    clock.reload_queue()
    assert clock.is_woken_by(wake("w0"))
    store.submit("a")
    await clock.tick(NOW + 1)
    assert (len(store.read_all), len(store.steps)) == (2, 1)


async def test_a_queue_cleared_during_a_read_is_read_again(store: InMemory) -> None:
    """The listener loses its connection while a tick waits for the changes."""
    clock = pool_on(store)
    read = store.view

    async def forget_and_read(pool: PoolId, *asked: Any) -> PoolView:
        clock.reload_queue()
        return await read(pool, *asked)

    store.view = forget_and_read  # type: ignore[method-assign, assignment]
    await clock.tick(NOW)
    store.view = read  # type: ignore[method-assign]
    await clock.tick(NOW + 1)
    assert len(store.read_all) == 2


async def test_a_change_without_notice_is_found_by_counting(store: InMemory) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    store.submit("a", is_noted=False)
    await clock.tick(NOW + SWEEP_S)
    await clock.tick(NOW + 2 * SWEEP_S)
    assert (len(store.read_all), len(store.steps)) == (2, 1)


async def test_a_run_that_differs_from_the_read_state_is_read_again_alone(store: InMemory) -> None:
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
    await clock.tick(NOW + 2)  # reads the end of the cycle, and waits for "b" for a moment
    again = await clock.tick(NOW + 3)
    await clock.tick(again)
    assert {op.run for op in store.steps[-1].ops} == {"a"}
    assert (store.read_all, store.read_runs) == ([0], ["a"])


async def test_after_a_data_loss_of_redis_the_queue_is_read_again(store: InMemory) -> None:
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


async def test_a_returning_worker_gets_its_runs_again(store: InMemory) -> None:
    clock = pool_on(store)
    await clock.tick(NOW)
    store.workers = [WORKER, WorkerId("w1")]
    await clock.tick(NOW + 1)
    store.workers = [WORKER]
    await clock.tick(NOW + 2)
    assert len(store.read_all) == 2  # for one worker more, not for one less
    store.workers = [WORKER, WorkerId("w1")]
    await clock.tick(NOW + 3)
    assert len(store.read_all) == 3


@dataclass
class HostTime:
    """Two clocks of a host: the operator sets one, and the other only advances."""

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
async def test_no_run_waits_for_a_clock_that_was_set_back(store: InMemory, host_time: HostTime, set_by: float) -> None:
    clock = pool_on(store)
    store.submit("a")
    await clock.tick_now()
    host_time.pass_by(0.5)
    store.finish()
    await clock.tick_now()  # reads the end of the cycle
    host_time.pass_by(0.01, set_by=set_by)
    store.submit("b")  # and nothing of the runs just answered
    await clock.tick_now()
    assert {op.run for op in store.steps[-1].ops} == {"b"}


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
async def test_a_metronome_continues_with_the_next_beat_after_a_clock_change(
    store: InMemory, host_time: HostTime, set_by: float
) -> None:
    clock = pool_on(store, clock_mode=ClockMode.METRONOME, clock_period_s=10)
    await clock.tick_now()
    host_time.pass_by(1, set_by=set_by)
    store.submit("a")
    await clock.tick_now()
    assert store.steps == []
    host_time.pass_by(10)
    await clock.tick_now()
    assert len(store.steps) == 1


async def test_a_clock_change_makes_no_worker_count_as_missing(store: InMemory, host_time: HostTime) -> None:
    clock = pool_on(store, reassign_after_s=30)
    store.dead = [WorkerId("w1")]
    await clock.tick_now()
    host_time.pass_by(1, set_by=3600.0)
    await clock.tick_now()
    host_time.pass_by(29)
    await clock.tick_now()
    assert store.reassigned == []
    host_time.pass_by(1)
    await clock.tick_now()
    assert store.reassigned == [("w1", WORKER)]


ADA, BOB = TenantId("ada"), TenantId("bob")


def queue(run: str, tenant: TenantId) -> RunQueue:
    op = QueuedOp(RunId(run), 1, OpKind.FORWARD, 10, "inline", 1, 0.0)
    return RunQueue(RunId(run), tenant, None, (op,))


def runs(waiting: Waiting) -> dict[str, list[str]]:
    return {tenant: list(of_tenant) for tenant, of_tenant in waiting.passes.items()}


WAITING = Waiting()
for each in (queue("a1", ADA), queue("a2", ADA), queue("b1", BOB)):
    WAITING.put(each)


def test_without_pauses_no_queue_is_copied() -> None:
    assert exclude_paused(WAITING, Pauses()) is WAITING


def test_a_paused_tenant_is_left_out_and_others_are_served() -> None:
    assert runs(exclude_paused(WAITING, Pauses({ADA: Pause(1.0)}))) == {"bob": ["b1"]}


def test_a_paused_run_is_left_out_and_others_of_its_tenant_are_served() -> None:
    paused = Pauses(runs={RunId("a1"): Pause(1.0, tenant=ADA)})
    assert runs(exclude_paused(WAITING, paused)) == {"ada": ["a2"], "bob": ["b1"]}


def test_a_tenant_with_only_paused_runs_counts_as_one_without_runs() -> None:
    paused = Pauses(runs={RunId("b1"): Pause(1.0, tenant=BOB)})
    assert runs(exclude_paused(WAITING, paused)) == {"ada": ["a1", "a2"]}
