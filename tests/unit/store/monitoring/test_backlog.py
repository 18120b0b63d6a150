"""Time to drain the backlog, and the number of workers needed now."""

from __future__ import annotations

import pytest

from cotrain_store.monitoring.backlog import (
    Demand,
    Growth,
    backlog_seconds,
    computed,
    workers_needed,
)


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
def test_the_backlog_takes_the_time_of_all_workers_together(
    tokens: int, rates: list[float], measured: float, seconds: float
) -> None:
    assert backlog_seconds(tokens, rates, measured) == seconds


@pytest.mark.parametrize(
    ("demand", "needed"),
    [
        (Demand(rates=(100.0,)), 0),
        (Demand(runs=1), 1),
        (Demand(samples=1), 1),
        (Demand(tokens=6_000, runs=9, rates=(100.0,)), 1),
        (Demand(tokens=6_001, runs=9, rates=(100.0,)), 2),
        (Demand(tokens=60_000, runs=99, rates=(100.0,) * 6), 10),
        # at most twice the present workers, and only one if there is none
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0)), 4),
        (Demand(tokens=60_000, runs=99, measured=50.0), 1),
        # the present workers finish within ten minutes
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0), growth=-101.0), 2),
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0), growth=-99.0), 4),
        # a run trains on one worker at a time
        (Demand(tokens=60_000, runs=3, rates=(100.0,) * 2), 3),
        # paused work needs none
        (Demand(tokens=60_000, runs=0, rates=(100.0,)), 0),
        # busy workers stay, and request no further ones
        (Demand(runs=2, rates=(1.0, 1.0), busy=1.2), 2),
        (Demand(runs=2, rates=(1.0, 1.0), busy=0.7), 1),
        (Demand(runs=2, rates=(1.0, 1.0), busy=2.0), 2),
        (Demand(runs=9, rates=(1.0,) * 3, busy=1.6000000000000003), 2),
        (Demand(rates=(1.0,), busy=0.001), 0),
    ],
)
def test_the_number_of_needed_workers(demand: Demand, needed: int) -> None:
    assert workers_needed(demand) == needed


def test_sampling_counts_as_computing_and_idling_does_not() -> None:
    assert computed({"train": 0.25, "optim": 0.125, "sample": 0.5, "idle": 0.125}) == 0.875


def test_growth_is_measured_over_the_last_half_minute() -> None:
    growth = Growth()
    assert growth.per_second(100, 0.0) == 0.0
    assert growth.per_second(120, 10.0) == 2.0
    assert growth.per_second(100, 30.0) == 0.0
    assert growth.per_second(0, 40.0) == -4.0  # since 10 s
    assert growth.per_second(50, 39.0) == 0.0  # the clock was set back
