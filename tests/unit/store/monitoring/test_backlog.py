"""How long what waits will take, and how many workers would end it within a minute."""

from __future__ import annotations

import pytest

from cotrain_store.monitoring.backlog import backlog_seconds, workers_wanted


@pytest.mark.parametrize(
    ("tokens", "rates", "measured", "seconds"),
    [
        (0, [100.0], 50.0, 0.0),
        (1000, [100.0], 50.0, 10.0),
        (1000, [100.0, 300.0], 50.0, 2.5),
        (1000, [], 50.0, 20.0),
        (1000, [], 0.0, 0.0),
    ],
)
def test_what_waits_takes_as_long_as_all_workers_need(
    tokens: int, rates: list[float], measured: float, seconds: float
) -> None:
    assert backlog_seconds(tokens, rates, measured) == seconds


@pytest.mark.parametrize(
    ("tokens", "rates", "is_busy", "wanted"),
    [
        (0, [100.0], False, 0),
        (0, [100.0], True, 1),
        (6_000, [100.0], True, 1),
        (6_001, [100.0], True, 2),
        (60_000, [100.0, 100.0], True, 10),
        (60_000, [], True, 20),
    ],
)
def test_so_many_workers_are_wanted(
    tokens: int, rates: list[float], is_busy: bool, wanted: int
) -> None:
    assert workers_wanted(tokens, rates, measured=50.0, is_busy=is_busy) == wanted
