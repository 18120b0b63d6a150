from __future__ import annotations

import pytest

from cotrain_scheduler.cycle_start import (
    FADES,
    GATHER_SHARE,
    PATIENCE,
    LastCycle,
    ReturnTimes,
    cycle_limit_s,
    eager_start,
    period_number,
)
from cotrain_store.messages.ids import RunId

A, B = RunId("a"), RunId("b")
SLOW = ReturnTimes(latest_s=10.0)
"""Recent return time longer than any gather window."""


def test_a_cycle_starts_at_once_when_every_run_has_returned() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=8.0, ended_at=100.0)
    assert eager_start(last, 100.001, 5.0, SLOW, are_back=True) == 100.001
    assert eager_start(LastCycle(), 3.0, 5.0, SLOW, are_back=True) == 3.0


def test_runs_just_answered_get_a_tenth_of_the_last_cycle_to_return() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 100.01, 0.005, SLOW, are_back=False) == 100.2
    assert eager_start(last, 100.3, 0.005, SLOW, are_back=False) == 100.3


def test_the_wait_is_limited_to_a_multiple_of_recent_return_times() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    quick = ReturnTimes(latest_s=0.02)
    assert eager_start(last, 100.01, 0.005, quick, are_back=False) == 100.0 + PATIENCE * 0.02
    assert eager_start(last, 100.0, 0.005, ReturnTimes(), are_back=False) == 100.005


def test_no_cycle_waits_for_tenants_that_left() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 500.0, 0.005, SLOW, are_back=False) == 500.0


def test_the_return_time_is_the_longest_in_the_window_and_decays() -> None:
    returns = ReturnTimes()
    returns.note([0.0, 0.15, 0.25, 7.0], limit_s=2.0)
    assert returns.latest_s == 0.15
    returns.note([0.01], limit_s=2.0)
    assert returns.latest_s == FADES * 0.15


def test_periods_start_at_multiples_of_their_length() -> None:
    assert period_number(9.99, 10.0) == 0
    assert period_number(10.0, 10.0) == 1


@pytest.mark.parametrize("period_s", [0.5, 10.0, 60.0])
def test_a_request_after_the_start_of_a_cycle_is_answered_in_a_period(period_s: float) -> None:
    """The wait is the rest of that cycle, the gather window and the whole next cycle, with a tenth
    of a period to spare.
    """
    limit_s = cycle_limit_s(period_s, begins_at_once=True)
    next_begins = eager_start(
        LastCycle(frozenset({A}), limit_s, ended_at=limit_s), limit_s, 0.005, SLOW, are_back=False
    )
    assert next_begins == pytest.approx(limit_s * (1 + GATHER_SHARE))
    assert next_begins + limit_s < 0.9 * period_s


def test_a_metronome_cycle_fills_its_period() -> None:
    assert cycle_limit_s(10.0, begins_at_once=False) == 10.0
