"""A time of day that is set while a scheduler runs: its clocks go on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cotrain_scheduler import host_time as host_time_module
from cotrain_store.messages.ids import WorkerId
from cotrain_store.settings.scheduler import ClockMode
from tests.support.pool_in_memory import NOW, WORKER, InMemory, pool_on


@pytest.fixture
def store() -> InMemory:
    return InMemory()


@dataclass
class HostTime:
    """A host's two clocks: the operator sets the one, and the other only ever goes on."""

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
async def test_no_run_waits_for_a_time_that_was_set_back(
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


async def test_no_worker_is_dead_for_long_because_the_time_was_set(
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
