from __future__ import annotations

from cotrain_scheduler.cycle_start import LastCycle, eager_start, period_number
from cotrain_store.messages.ids import RunId

A, B = RunId("a"), RunId("b")


def test_a_cycle_starts_at_once_when_everybody_is_back() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=8.0, ended_at=100.0)
    assert eager_start(last, 100.001, gather_s=5.0, are_back=True) == 100.001
    assert eager_start(LastCycle(), 3.0, gather_s=5.0, are_back=True) == 3.0


def test_those_just_answered_get_a_tenth_of_the_last_cycle_to_come_back() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 100.01, gather_s=0.005, are_back=False) == 100.2
    assert eager_start(last, 100.3, gather_s=0.005, are_back=False) == 100.3


def test_nobody_waits_for_tenants_that_left() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 500.0, gather_s=0.005, are_back=False) == 500.0


def test_periods_begin_on_multiples_of_their_length() -> None:
    assert period_number(9.99, 10.0) == 0
    assert period_number(10.0, 10.0) == 1
