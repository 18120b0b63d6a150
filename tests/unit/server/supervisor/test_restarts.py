"""How soon a dead process comes back."""

from __future__ import annotations

from cotrain_server.supervisor.restarts import Deaths


def died(times: list[float]) -> Deaths:
    deaths = Deaths()
    for time in times:
        deaths = deaths.plus(time)
    return deaths


def test_a_first_death_is_answered_almost_at_once() -> None:
    assert died([100.0]).delay_s == 0.1


def test_each_further_death_doubles_the_delay() -> None:
    assert [died([0.0] * n).delay_s for n in range(1, 5)] == [0.1, 0.2, 0.4, 0.8]


def test_five_deaths_in_a_minute_are_a_crash_loop_retried_every_five_seconds() -> None:
    deaths = died([0.0, 10.0, 20.0, 30.0, 59.0])
    assert deaths.is_crash_loop
    assert deaths.delay_s == 5.0


def test_old_deaths_are_forgotten() -> None:
    deaths = died([0.0, 1.0, 2.0, 3.0, 100.0])
    assert not deaths.is_crash_loop
    assert deaths.delay_s == 0.1
