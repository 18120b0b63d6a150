"""All of the device's time is booked, once, and what was booked never becomes less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.worker.device_time import DeviceTime, Duty, Phase


@given(
    st.lists(
        st.tuples(st.sampled_from(Phase), st.floats(0, 10), st.floats(0, 20)), min_size=1
    )
)  # fmt: skip
def test_whatever_happens_the_phases_add_up_and_only_grow(
    laps: list[tuple[Phase, float, float]],
) -> None:
    clock = SimpleNamespace(now=100.0)
    device = DeviceTime(lambda: clock.now)
    before = device.seconds
    for phase, passed, optim_s in laps:
        clock.now += passed
        if phase is Phase.TRAIN:
            device.optimized(optim_s)
        device.lap(phase)
        assert all(device.seconds[each] >= before[each] for each in before)
        before = device.seconds
    assert sum(before.values()) == pytest.approx(clock.now - 100.0)


def test_what_the_optimizer_took_is_taken_from_training() -> None:
    clock = SimpleNamespace(now=0.0)
    device = DeviceTime(lambda: clock.now)
    for now, phase in ((1, Phase.IDLE), (4, Phase.TRAIN), (5, Phase.SAMPLE)):
        clock.now = now
        device.lap(phase)
    device.optimized(0.5)
    clock.now = 7
    device.lap(Phase.TRAIN)
    assert device.seconds == {"train": 4.5, "optim": 0.5, "sample": 1.0, "idle": 1.0}


def test_more_of_the_optimizer_than_one_lap_has_room_for_is_booked_with_the_next() -> None:
    clock = SimpleNamespace(now=0.0)
    device = DeviceTime(lambda: clock.now)
    device.optimized(3.0)
    for now in (2, 4):
        clock.now = now
        device.lap(Phase.TRAIN)
    assert (device.seconds["optim"], device.seconds["train"]) == (3.0, 1.0)


def test_the_duty_is_that_of_the_last_minute() -> None:
    duty = Duty(window_s=60)
    assert duty.shares({"train": 0.0, "idle": 0.0}, now=0) == {"train": 0.0, "idle": 0.0}
    assert duty.shares({"train": 30.0, "idle": 10.0}, now=40) == {"train": 0.75, "idle": 0.25}
    assert duty.shares({"train": 30.0, "idle": 70.0}, now=100) == {"train": 0.0, "idle": 1.0}
