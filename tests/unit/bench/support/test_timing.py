from __future__ import annotations

import time
from functools import partial

from bench.support.timing import Took, alternate, percentile, ratios, turns


def test_ways_are_warmed_up_and_then_alternated_and_each_round_starts_with_the_next() -> None:
    ran: list[str] = []

    def way(name: str) -> int:
        ran.append(name)
        return len(ran)

    ways = {name: partial(way, name) for name in "ab"}

    found = alternate(ways, rounds=3)

    assert "".join(ran) == "ab" + "ab" + "ba" + "ab"
    assert found == {"a": [3, 6, 7], "b": [4, 5, 8]}


def test_one_round_is_measured_even_after_the_time_limit() -> None:
    assert list(turns("ab", rounds=5, until=time.monotonic() - 1)) == ["a", "b"]


def test_the_minimum_of_each_time_is_reported() -> None:
    assert Took(1.0, 4.0).fastest(Took(2.0, 3.0)) == Took(1.0, 3.0)


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios([2.0, 30.0], [1.0, 10.0]) == [2.0, 3.0]


def test_a_percentile_of_no_values_is_the_given_one() -> None:
    assert [percentile(values, 0.5, 7.0) for values in ([], [3.0, 1.0, 2.0])] == [7.0, 2.0]
