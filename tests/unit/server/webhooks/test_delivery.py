"""Delays between the attempts to deliver an event."""

from cotrain_server.webhooks.delivery import GIVEN_UP_AFTER_S, LONGEST_RETRY_S, retry_in


def test_delays_double_up_to_an_hour() -> None:
    assert [retry_in(attempts, 0) for attempts in (1, 2, 3)] == [5.0, 10.0, 20.0]
    assert retry_in(30, 0) == retry_in(10**9, 0) == LONGEST_RETRY_S


def test_an_event_is_dropped_after_a_day() -> None:
    age_s, attempts = 0.0, 1
    while (wait_s := retry_in(attempts, age_s)) is not None:
        age_s, attempts = age_s + wait_s, attempts + 1
    assert GIVEN_UP_AFTER_S - LONGEST_RETRY_S < age_s <= GIVEN_UP_AFTER_S
    assert attempts == 33
