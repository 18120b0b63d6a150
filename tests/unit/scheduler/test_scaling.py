"""Wanted number of workers: the current need, its damping, and an autoscaler that follows it.

The autoscaler runs in simulated time: workers take minutes to start, and the backlog grows meanwhile.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.scaling import (
    DOWN_AFTER_S,
    SPAN_S,
    UP_AFTER_S,
    Demand,
    Growth,
    differs,
    first_scaling,
    next_scaling,
    workers_needed,
)
from cotrain_store.messages.fleet import STALE_S, Bounds, Scaling, parse_scaling
from cotrain_store.messages.ids import WorkerId, encode
from tests.support.draws import examples, variant

RATE = 1_000.0
EVERY_S = 2.0
STARTS_S = 180.0
"""Between the wish for a worker and its first step: a node, a pod, the base model."""
MINUTE = int(60 / EVERY_S)


def followed(load: list[tuple[float, float]], runs: int = 20) -> list[int]:
    """Return the wanted number at each look. `load` has pairs of a duration in s and the workers' worth
    of tokens offered.
    """
    now, tokens, there = 0.0, 0.0, 0
    coming: list[float] = []
    scaling = first_scaling(0, now, Bounds(least=0))
    busy: list[float] = []
    growth = Growth()
    found = []
    for for_s, offered in load:
        for _ in range(int(for_s / EVERY_S)):
            now += EVERY_S
            there += sum(at <= now for at in coming)
            coming = [at for at in coming if at > now]
            tokens += offered * RATE * EVERY_S
            done = min(tokens, there * RATE * EVERY_S)
            tokens -= done
            busy = [*busy[1 - MINUTE :], done / (RATE * EVERY_S)]
            demand = Demand(
                tokens=int(tokens),
                growth=growth.per_second(int(tokens), now),
                runs=runs if offered or tokens else 0,
                rates=(RATE,) * there,
                measured=RATE,
                busy=min(float(there), sum(busy) / MINUTE),
            )
            scaling = next_scaling(scaling, workers_needed(demand), now, Bounds(least=0))
            coming += [now + STARTS_S] * (scaling.wanted - there - len(coming))
            while scaling.wanted < there + len(coming):
                if coming:
                    coming.pop()
                else:
                    there -= 1
            found.append(scaling.wanted)
    return found


def changes(found: list[int]) -> list[tuple[int, int]]:
    return [(before, after) for before, after in pairwise(found) if before != after]


@pytest.mark.parametrize("load", [0.3, 2.5, *map(variant, (0.7, 1.5, 4.2))])
def test_a_steady_load_ends_with_a_steady_number_that_carries_it(load: float) -> None:
    found = followed([(4 * 3600.0, load)])
    turns = [after > before for before, after in changes(found)]
    # Up while workers start, once down to the need of the load, and never up again.
    assert turns == sorted(turns, reverse=True)
    assert len(set(found[-int(3600 / EVERY_S) :])) == 1
    assert load <= found[-1] <= load / 0.8 + 1
    assert max(found) <= 2 * load + 2


def test_a_load_that_comes_and_goes_every_minute_moves_nothing_for_hours() -> None:
    found = followed([(60.0, 1.6), (60.0, 0.0)] * 120)
    settled = found[-int(3600 / EVERY_S) :]
    assert len(set(settled)) == 1
    assert settled[0] <= 2


def test_a_day_begins_at_nothing_and_ends_there() -> None:
    found = followed([(600.0, 0.0), (7200.0, 3.0), (3600.0, 0.0)])
    assert (found[0], found[-1]) == (0, 0)
    assert max(found) <= 8
    last = max(i for i, each in enumerate(found) if each > 1)
    assert last * EVERY_S <= 600 + 7200 + 2 * DOWN_AFTER_S


TO_ZERO = Bounds(least=0)


def wanted(needed: list[tuple[float, int]], bounds: Bounds = TO_ZERO, workers: int = 0) -> list[int]:
    """Return the wanted number at each look, every 2 s. `needed` has pairs of a duration in s and a need."""
    now = 1_000.0
    scaling, found = first_scaling(workers, now, bounds), []
    for for_s, number in needed:
        for _ in range(int(for_s / EVERY_S)):
            now += EVERY_S
            scaling = next_scaling(scaling, number, now, bounds)
            found.append(scaling.wanted)
    return found


def test_the_first_worker_is_wanted_at_once() -> None:
    assert wanted([(600, 0), (2, 1)])[-2:] == [0, 1]


def test_more_are_wanted_once_so_many_were_needed_for_a_while() -> None:
    found = wanted([(60, 1), (120, 4)])
    after = found[30:].index(4) * EVERY_S
    assert UP_AFTER_S - SPAN_S <= after <= UP_AFTER_S + SPAN_S


def test_a_burst_that_is_soon_over_adds_none() -> None:
    assert set(wanted([(60, 1), (UP_AFTER_S - 2 * SPAN_S, 9), (60, 1)])) == {1}


def test_fewer_are_wanted_once_no_more_were_needed_for_long() -> None:
    found = wanted([(60, 3), (600, 1)], workers=3)
    after = found[30:].index(1) * EVERY_S
    assert DOWN_AFTER_S - SPAN_S <= after <= DOWN_AFTER_S + 2 * SPAN_S


def test_a_need_that_goes_to_and_fro_moves_nothing() -> None:
    assert set(wanted([(40, 2), (40, 5)] * 30, workers=5)) == {5}


def test_the_last_worker_goes_once_the_pool_was_idle_for_the_stated_time() -> None:
    found = wanted([(60, 2), (1_200, 0)], Bounds(0, 0, 900.0), workers=2)
    assert abs(found[30:].index(0) * EVERY_S - 900) <= SPAN_S


def test_a_pool_without_workers_and_work_stays_without() -> None:
    assert set(wanted([(1_200, 0)])) == {0}


@pytest.mark.parametrize(("needed", "found"), [(0, 2), (9, 4)])
def test_the_operators_bounds_hold(needed: int, found: int) -> None:
    assert wanted([(1_200, needed)], Bounds(2, 4))[-1] == found


@settings(max_examples=examples(30))  # each is some thousand looks
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 20)), max_size=12))
def test_it_never_goes_up_and_down_again_faster_than_it_says(needed: list[tuple[int, int]]) -> None:
    found = wanted([(2.0 * n, number) for n, number in needed])
    ups = [i for i, (a, b) in enumerate(pairwise(found)) if b > a]
    downs = [i for i, (a, b) in enumerate(pairwise(found)) if b < a]
    for up in ups:
        later = [down for down in downs if down > up]
        if later and found[up + 1] > 1:
            assert (min(later) - up) * EVERY_S >= DOWN_AFTER_S - UP_AFTER_S - 2 * SPAN_S
    assert max(found, default=0) <= max([number for _, number in needed], default=0)


def test_a_clock_that_is_set_moves_nothing() -> None:
    scaling = next_scaling(first_scaling(3, 1_000.0, TO_ZERO), 3, 1_002.0, TO_ZERO)
    for now in (500.0, 502.0, 90_000.0, 90_002.0):
        scaling = next_scaling(scaling, 0, now, TO_ZERO)
        assert scaling.wanted == 3


def test_the_next_scheduler_goes_on_from_the_record() -> None:
    scaling = next_scaling(first_scaling(1, 1_000.0, TO_ZERO), 2, 1_002.0, TO_ZERO, {WorkerId("w0"): 7})
    assert parse_scaling(encode(scaling).encode()) == scaling
    assert parse_scaling(None) is None


def test_a_record_is_news_when_it_says_something_else_or_is_due() -> None:
    first = Scaling(1, 1_000.0, 1_000.0)
    assert not differs(next_scaling(first, 0, 1_002.0, Bounds()), first, 10.0)
    assert differs(next_scaling(first, 0, 1_010.0, Bounds()), first, 10.0)
    assert differs(next_scaling(first, 0, 1_002.0, Bounds(2)), first, 10.0)
    assert first.is_current(1_000.0 + STALE_S / 2)
    assert not first.is_current(1_000.0 + 2 * STALE_S)


@pytest.mark.parametrize(
    ("demand", "needed"),
    [
        (Demand(rates=(100.0,)), 0),
        (Demand(runs=1), 1),
        (Demand(samples=1), 1),
        (Demand(tokens=6_000, runs=9, rates=(100.0,)), 1),
        (Demand(tokens=6_001, runs=9, rates=(100.0,)), 2),
        (Demand(tokens=60_000, runs=99, rates=(100.0,) * 6), 10),
        # at most twice those there are, and the first one alone
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0)), 4),
        (Demand(tokens=60_000, runs=99, measured=50.0), 1),
        # it is over in ten minutes with those there are
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0), growth=-101.0), 2),
        (Demand(tokens=60_000, runs=99, rates=(100.0, 100.0), growth=-99.0), 4),
        # a run trains on one worker at a time
        (Demand(tokens=60_000, runs=3, rates=(100.0,) * 2), 3),
        # paused work needs none
        (Demand(tokens=60_000, runs=0, rates=(100.0,)), 0),
        # workers that compute stay, and bring no further ones
        (Demand(runs=2, rates=(1.0, 1.0), busy=1.2), 2),
        (Demand(runs=2, rates=(1.0, 1.0), busy=0.7), 1),
        (Demand(runs=2, rates=(1.0, 1.0), busy=2.0), 2),
        (Demand(runs=9, rates=(1.0,) * 3, busy=1.6000000000000003), 2),
        (Demand(rates=(1.0,), busy=0.001), 0),
    ],
)
def test_so_many_workers_are_needed(demand: Demand, needed: int) -> None:
    assert workers_needed(demand) == needed


def test_growth_is_that_of_the_last_half_minute() -> None:
    growth = Growth()
    assert growth.per_second(100, 0.0) == 0.0
    assert growth.per_second(120, 10.0) == 2.0
    assert growth.per_second(100, 30.0) == 0.0
    assert growth.per_second(0, 40.0) == -4.0  # since 10
    assert growth.per_second(50, 39.0) == 0.0  # the clock was set back
