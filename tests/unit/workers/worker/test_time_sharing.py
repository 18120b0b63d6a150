"""When the decoder gets its turns, on a clock that only work moves; and neither side starves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from cotrain_workers.worker.device_time import DeviceTime
from cotrain_workers.worker.time_sharing import GAP_S, Share, TimeSharing
from tests.support.full_table import no_descriptor

if TYPE_CHECKING:
    from cotrain_workers.sampling.service import SamplingService

STEP_S = 0.03

shares = st.floats(0.0, 0.9)
seconds = st.floats(1e-4, 30.0)


class Sampler:
    """Always has something to decode."""

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
    monkeypatch.setattr("cotrain_workers.worker.time_sharing.time", fake)
    return clock


class WithoutDescriptors(Sampler):
    """Cannot open any file."""

    @override
    def advance(self) -> bool:
        super().advance()
        no_descriptor()


def train(sharing: TimeSharing, clock: SimpleNamespace, seconds: float) -> None:
    sharing.training_begins()
    clock.now += seconds
    sharing.yield_to_decoder()
    sharing.training_ends()


def sharing_of(
    clock: SimpleNamespace, kind: type[Sampler] = Sampler
) -> tuple[TimeSharing, Sampler]:
    sampler = kind(clock)
    service = cast("SamplingService", sampler)
    return TimeSharing(service, Share(0.5), threading.Event(), DeviceTime()), sampler


def test_steps_that_follow_each_other_keep_their_share_of_all_the_time(
    clock: SimpleNamespace,
) -> None:
    """The road from one step to the next, which the decoder uses, is charged to it."""
    sharing, sampler = sharing_of(clock)
    began = clock.now
    for _ in range(50):
        train(sharing, clock, 0.2)
        sharing.decode_while_idle()
    assert sampler.steps * STEP_S <= 0.5 * (clock.now - began) + STEP_S


def test_what_is_decoded_while_training_rests_is_free(clock: SimpleNamespace) -> None:
    sharing, sampler = sharing_of(clock)
    train(sharing, clock, 0.2)
    while clock.now < 101 + GAP_S:
        sharing.decode_while_idle()
    before = sampler.steps
    train(sharing, clock, 0.2)
    assert (sampler.steps - before) * STEP_S >= 0.2 - STEP_S


def test_a_sampler_that_can_read_nothing_now_does_no_harm_to_training(
    clock: SimpleNamespace,
) -> None:
    sharing, sampler = sharing_of(clock, WithoutDescriptors)
    train(sharing, clock, 0.2)
    assert sampler.steps == 1


@given(shares, st.lists(st.tuples(seconds, st.lists(seconds, min_size=1)), min_size=1))
def test_over_any_prefix_each_keeps_its_share_up_to_one_step(
    sampling_share: float, visits: list[tuple[float, list[float]]]
) -> None:
    """Each visit: a period of training, then decode steps (of these lengths, again and again)."""
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


def test_a_decoder_that_had_nothing_to_do_saves_nothing_up() -> None:
    share = Share(0.5)
    share.trained(100.0)
    share.forfeit()
    share.trained(1.0)
    share.decoded(1.0)
    assert not share.may_decode


def test_what_a_long_decode_step_took_too_much_is_paid_back_before_the_next() -> None:
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
