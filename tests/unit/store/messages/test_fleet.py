"""Number of workers that a pool requests: at once for the first, later for more, much later for
fewer.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_store.messages.fleet import (
    DOWN_AFTER_S,
    SPAN_S,
    STALE_S,
    UP_AFTER_S,
    Bounds,
    Scaling,
    first_scaling,
    parse_scaling,
)
from cotrain_store.messages.ids import WorkerId, encode

EVERY_S = 2.0
TO_ZERO = Bounds(least=0)


def wanted(
    needed: list[tuple[float, int]], bounds: Bounds = TO_ZERO, workers: int = 0
) -> list[int]:
    """Return the requested workers every 2 s, for phases of (seconds, needed workers)."""
    now = 1_000.0
    scaling, found = first_scaling(workers, now, bounds), []
    for for_s, number in needed:
        for _ in range(int(for_s / EVERY_S)):
            now += EVERY_S
            scaling = scaling.after(number, now, bounds)
            found.append(scaling.wanted)
    return found


def test_the_first_worker_is_requested_at_once() -> None:
    assert wanted([(600, 0), (2, 1)])[-2:] == [0, 1]


def test_more_workers_are_requested_after_a_sustained_need() -> None:
    found = wanted([(60, 1), (120, 4)])
    after = found[30:].index(4) * EVERY_S
    assert UP_AFTER_S - SPAN_S <= after <= UP_AFTER_S + SPAN_S


def test_a_short_burst_requests_no_worker() -> None:
    assert set(wanted([(60, 1), (UP_AFTER_S - 2 * SPAN_S, 9), (60, 1)])) == {1}


def test_fewer_workers_are_requested_after_a_long_lower_need() -> None:
    found = wanted([(60, 3), (600, 1)], workers=3)
    after = found[30:].index(1) * EVERY_S
    assert DOWN_AFTER_S - SPAN_S <= after <= DOWN_AFTER_S + 2 * SPAN_S


def test_an_alternating_need_changes_nothing() -> None:
    assert set(wanted([(40, 2), (40, 5)] * 30, workers=5)) == {5}


def test_the_last_worker_is_released_after_the_idle_time() -> None:
    found = wanted([(60, 2), (1_200, 0)], Bounds(0, 0, 900.0), workers=2)
    assert abs(found[30:].index(0) * EVERY_S - 900) <= SPAN_S


def test_a_pool_without_work_gets_no_worker() -> None:
    assert set(wanted([(1_200, 0)])) == {0}


@pytest.mark.parametrize(("needed", "found"), [(0, 2), (9, 4)])
def test_the_bounds_of_the_operator_hold(needed: int, found: int) -> None:
    assert wanted([(1_200, needed)], Bounds(2, 4))[-1] == found


@settings(max_examples=25)  # several thousand steps each
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 20)), max_size=12))
def test_a_scale_down_follows_a_scale_up_only_after_the_delay(
    needed: list[tuple[int, int]],
) -> None:
    found = wanted([(2.0 * n, number) for n, number in needed])
    ups = [i for i, (a, b) in enumerate(pairwise(found)) if b > a]
    downs = [i for i, (a, b) in enumerate(pairwise(found)) if b < a]
    for up in ups:
        later = [down for down in downs if down > up]
        if later and found[up + 1] > 1:
            assert (min(later) - up) * EVERY_S >= DOWN_AFTER_S - UP_AFTER_S - 2 * SPAN_S
    assert max(found, default=0) <= max([number for _, number in needed], default=0)


def test_a_change_of_the_clock_changes_nothing() -> None:
    scaling = first_scaling(3, 1_000.0, TO_ZERO).after(3, 1_002.0, TO_ZERO)
    for now in (500.0, 502.0, 90_000.0, 90_002.0):
        scaling = scaling.after(0, now, TO_ZERO)
        assert scaling.wanted == 3


def test_the_next_scheduler_continues_from_the_record() -> None:
    scaling = first_scaling(1, 1_000.0, TO_ZERO).after(2, 1_002.0, TO_ZERO, {WorkerId("w0"): 7})
    assert parse_scaling(encode(scaling).encode()) == scaling
    assert parse_scaling(None) is None


def test_a_record_is_written_when_it_differs_or_is_due() -> None:
    first = Scaling(1, 1_000.0, 1_000.0)
    assert not first.after(0, 1_002.0, Bounds()).differs(first, 10.0)
    assert first.after(0, 1_010.0, Bounds()).differs(first, 10.0)
    assert first.after(0, 1_002.0, Bounds(2)).differs(first, 10.0)
    assert first.is_current(1_000.0 + STALE_S / 2)
    assert not first.is_current(1_000.0 + 2 * STALE_S)
