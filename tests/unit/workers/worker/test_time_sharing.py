"""When the decoder gets its turns, on a clock that only work moves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from typing_extensions import override

from cotrain_workers.worker.share import Share
from cotrain_workers.worker.time_sharing import ROAD_S, Beside
from tests.support.full_table import no_descriptor

if TYPE_CHECKING:
    from cotrain_workers.sampling.service import SamplingService

STEP_S = 0.03


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


def train(beside: Beside, clock: SimpleNamespace, seconds: float) -> None:
    beside.training_begins()
    clock.now += seconds
    beside.between()
    beside.training_ends()


def turns(clock: SimpleNamespace, kind: type[Sampler] = Sampler) -> tuple[Beside, Sampler]:
    sampler = kind(clock)
    service = cast("SamplingService", sampler)
    return Beside(service, Share(0.5), threading.Event()), sampler


def test_steps_that_follow_each_other_keep_their_share_of_all_the_time(
    clock: SimpleNamespace,
) -> None:
    """The road from one step to the next, which the decoder uses, is charged to it."""
    beside, sampler = turns(clock)
    began = clock.now
    for _ in range(50):
        train(beside, clock, 0.2)
        beside.rest()
    assert sampler.steps * STEP_S <= 0.5 * (clock.now - began) + STEP_S


def test_what_is_decoded_while_training_rests_is_free(clock: SimpleNamespace) -> None:
    beside, sampler = turns(clock)
    train(beside, clock, 0.2)
    while clock.now < 101 + ROAD_S:
        beside.rest()
    before = sampler.steps
    train(beside, clock, 0.2)
    assert (sampler.steps - before) * STEP_S >= 0.2 - STEP_S


def test_a_sampler_that_can_read_nothing_now_does_no_harm_to_training(
    clock: SimpleNamespace,
) -> None:
    beside, sampler = turns(clock, WithoutDescriptors)
    train(beside, clock, 0.2)
    assert sampler.steps == 1
