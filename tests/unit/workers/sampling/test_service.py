"""Decoding rate of sample requests."""

from __future__ import annotations

import pytest

from cotrain_workers.sampling.service import MEMORY_S, DecodeRate


def test_the_rate_is_zero_before_the_first_step() -> None:
    assert DecodeRate().tokens_per_s == 0.0


def test_training_between_steps_with_remaining_work_counts() -> None:
    rate = DecodeRate()
    for number in range(20):  # a step of 0.1 s, then 0.3 s of training
        began = 0.4 * number
        rate.step(40, began, began + 0.1)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.05)


def test_time_without_work_does_not_count() -> None:
    rate = DecodeRate()
    for number in range(20):
        rate.step(40, 1000.0 * number, 1000.0 * number + 0.1)
        rate.rest()
    assert rate.tokens_per_s == pytest.approx(400)


def test_the_rate_follows_a_change_within_a_few_time_constants() -> None:
    rate = DecodeRate()
    for second in range(12 * int(MEMORY_S)):
        rate.step(1_000 if second < 4 * MEMORY_S else 10, second, second + 1.0)
    assert rate.tokens_per_s == pytest.approx(10, rel=0.05)
