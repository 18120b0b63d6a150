"""Booking of the device's time: all of it, once, and never reduced afterwards.

Throughput estimate from the durations of cycles of any size.

Time sharing between training and the decoder, on a simulated clock: neither side starves.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from cotrain_workers.sampling.service import SamplingService
from cotrain_workers.worker.device_time import GAP_S, DeviceTime, Duty, Phase, Share, Throughput, TimeSharing
from tests.support.full_table import no_descriptor


@given(
    st.lists(
        st.tuples(st.sampled_from(Phase), st.floats(0, 10), st.floats(0, 20)), min_size=1
    )
)  # fmt: skip
def test_the_phases_always_add_up_and_never_decrease(laps: list[tuple[Phase, float, float]]) -> None:
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


def test_optimizer_time_is_subtracted_from_training_time() -> None:
    clock = SimpleNamespace(now=0.0)
    device = DeviceTime(lambda: clock.now)
    for now, phase in ((1, Phase.IDLE), (4, Phase.TRAIN), (5, Phase.SAMPLE)):
        clock.now = now
        device.lap(phase)
    device.optimized(0.5)
    clock.now = 7
    device.lap(Phase.TRAIN)
    assert device.seconds == {"train": 4.5, "optim": 0.5, "sample": 1.0, "idle": 1.0}


def test_optimizer_time_beyond_one_lap_is_booked_with_the_next() -> None:
    clock = SimpleNamespace(now=0.0)
    device = DeviceTime(lambda: clock.now)
    device.optimized(3.0)
    for now in (2, 4):
        clock.now = now
        device.lap(Phase.TRAIN)
    assert (device.seconds["optim"], device.seconds["train"]) == (3.0, 1.0)


def test_the_duty_covers_the_last_minute() -> None:
    duty = Duty(window_s=60)
    assert duty.shares({"train": 0.0, "idle": 0.0}, now=0) == {"train": 0.0, "idle": 0.0}
    assert duty.shares({"train": 30.0, "idle": 10.0}, now=40) == {"train": 0.75, "idle": 0.25}
    assert duty.shares({"train": 30.0, "idle": 70.0}, now=100) == {"train": 0.0, "idle": 1.0}


MICRO_BATCH = 8192


class Machine:
    """Machine with a duration per forward and per token, random within a quarter."""

    def __init__(self, overhead_s: float, tokens_per_s: float) -> None:
        self._overhead_s, self._per_token_s = overhead_s, 1 / tokens_per_s
        self._rng = random.Random(0)
        self.rate = 1 / (self._per_token_s + overhead_s / MICRO_BATCH)

    def run(self, tokens: int) -> tuple[int, int, float]:
        forwards = -(-tokens // MICRO_BATCH)
        seconds = forwards * self._overhead_s + tokens * self._per_token_s
        return forwards, tokens, seconds * self._rng.uniform(0.8, 1.25)


def after_small_cycles(machine: Machine, found: Throughput, cycles: int, most: int) -> float:
    rng = random.Random(1)
    for _ in range(cycles):
        found.measure(*machine.run(rng.randint(1, most)))
    return found.tokens_per_s(MICRO_BATCH)


def after_full_cycles(machine: Machine, found: Throughput, cycles: int, period_s: float) -> float:
    """Return the estimate after cycles of the size that was estimated before each."""
    for _ in range(cycles):
        tokens = max(1, int(found.tokens_per_s(MICRO_BATCH) * period_s))
        found.measure(*machine.run(tokens))
    return found.tokens_per_s(MICRO_BATCH)


def test_small_cycles_alone_do_not_lower_the_throughput_estimate() -> None:
    """A cycle of six tokens takes 20 ms here: 300 tokens per second, of 45,000."""
    machine = Machine(0.02, 50_000)
    believed = after_small_cycles(machine, Throughput(50_000), 2000, most=12)
    assert machine.rate / 2 < believed < machine.rate * 2


def test_a_throughput_is_measured_from_small_cycles_only() -> None:
    """A large model on a CPU: 10 s are enough for 100 tokens, and a wrong guess gives 1,000."""
    machine = Machine(1.5, 10)
    believed = after_small_cycles(machine, Throughput(400), 60, most=200)
    assert believed == pytest.approx(machine.rate, rel=0.5)


@pytest.mark.parametrize("first", [50, 5_000, 500_000])
def test_a_wrong_first_estimate_is_corrected_by_the_next_cycles(first: float) -> None:
    machine = Machine(0.02, 50_000)
    believed = after_full_cycles(machine, Throughput(first), 20, period_s=10)
    assert believed == pytest.approx(machine.rate, rel=0.3)


def test_a_lower_throughput_is_estimated_within_ten_cycles() -> None:
    found = Throughput(50_000)
    after_full_cycles(Machine(0.02, 50_000), found, 20, period_s=10)
    slower = Machine(0.02, 12_500)
    assert after_full_cycles(slower, found, 10, 10) == pytest.approx(slower.rate, rel=0.3)


def test_one_long_cycle_changes_the_estimate_little() -> None:
    found = Throughput(50_000)
    before = after_full_cycles(Machine(0.02, 50_000), found, 20, period_s=10)
    found.measure(13, 100_000, 60.0)
    assert found.tokens_per_s(MICRO_BATCH) == pytest.approx(before, rel=0.2)


def test_a_cycle_without_passes_does_not_change_the_estimate() -> None:
    found = Throughput(1000)
    found.measure(0, 0, 3.0)
    assert found.tokens_per_s(MICRO_BATCH) == 1000


STEP_S = 0.03

shares = st.floats(0.0, 0.9)
seconds = st.floats(1e-4, 30.0)


class Sampler:
    """Sampler that always has work."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self._clock = clock
        self.steps = 0

    def advance(self) -> bool:
        self.steps += 1
        self._clock.now += STEP_S
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("cotrain_workers.worker.device_time.time", fake)
    return clock


class WithoutDescriptors(Sampler):
    """Sampler that cannot open any file."""

    @override
    def advance(self) -> bool:
        super().advance()
        no_descriptor()


def train(sharing: TimeSharing, clock: SimpleNamespace, seconds: float) -> None:
    sharing.training_begins()
    clock.now += seconds
    sharing.yield_to_decoder()
    sharing.training_ends()


def sharing_of(clock: SimpleNamespace, kind: type[Sampler] = Sampler) -> tuple[TimeSharing, Sampler]:
    sampler = kind(clock)
    service = cast("SamplingService", sampler)
    return TimeSharing(service, Share(0.5), threading.Event(), DeviceTime()), sampler


def test_successive_steps_leave_sampling_only_its_share_of_all_time(clock: SimpleNamespace) -> None:
    """The decoder also uses the time between two steps, which is charged to it."""
    sharing, sampler = sharing_of(clock)
    began = clock.now
    for _ in range(50):
        train(sharing, clock, 0.2)
        sharing.decode_while_idle()
    assert sampler.steps * STEP_S <= 0.5 * (clock.now - began) + STEP_S


def test_decoding_while_training_is_idle_is_free(clock: SimpleNamespace) -> None:
    sharing, sampler = sharing_of(clock)
    train(sharing, clock, 0.2)
    while clock.now < 101 + GAP_S:
        sharing.decode_while_idle()
    before = sampler.steps
    train(sharing, clock, 0.2)
    assert (sampler.steps - before) * STEP_S >= 0.2 - STEP_S


def test_a_sampler_without_descriptors_does_not_disturb_training(clock: SimpleNamespace) -> None:
    sharing, sampler = sharing_of(clock, WithoutDescriptors)
    train(sharing, clock, 0.2)
    assert sampler.steps == 1


@given(shares, st.lists(st.tuples(seconds, st.lists(seconds, min_size=1)), min_size=1))
def test_over_any_prefix_both_keep_their_share_up_to_one_step(
    sampling_share: float, visits: list[tuple[float, list[float]]]
) -> None:
    """A visit is a period of training, followed by decode steps of the given durations in rotation."""
    share = Share(sampling_share)
    trained = decoded = longest_period = longest_step = 0.0
    for period, steps in visits:
        longest_period = max(longest_period, period)
        trained += period
        share.trained(period)
        assert decoded >= sampling_share * (trained + decoded - longest_period) - 1e-6
        at = 0
        while share.may_decode and at < 10_000:
            step = max(steps[at % len(steps)], period / 100)
            at += 1
            longest_step = max(longest_step, step)
            decoded += step
            share.decoded(step)
            both = trained + decoded
            assert trained >= (1 - sampling_share) * (both - longest_step) - 1e-6


def test_an_idle_decoder_accumulates_no_credit() -> None:
    share = Share(0.5)
    share.trained(100.0)
    share.forfeit()
    share.trained(1.0)
    share.decoded(1.0)
    assert not share.may_decode


def test_excess_time_of_a_long_decode_step_is_paid_back_first() -> None:
    share = Share(0.5)
    share.trained(1.0)
    share.decoded(4.0)
    share.forfeit()
    share.trained(2.9)
    assert not share.may_decode
    share.trained(0.2)
    assert share.may_decode


@pytest.mark.parametrize("period", [0.0, 1.0, 1e6])
def test_with_no_share_the_decoder_waits_until_training_is_idle(period: float) -> None:
    share = Share(0.0)
    share.trained(period)
    assert not share.may_decode
