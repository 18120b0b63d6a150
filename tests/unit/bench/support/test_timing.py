from __future__ import annotations

import time

from bench.support.timing import Took, alternate


def test_variants_are_warmed_up_and_then_alternated() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}

    alternate(ways, "cpu", rounds=2, until=time.monotonic() + 60)

    assert "".join(ran) == "ab" + "abab"


def test_one_round_is_measured_even_after_the_time_limit() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}

    took = alternate(ways, "cpu", rounds=5, until=time.monotonic() - 1)

    assert "".join(ran) == "ab" + "ab"
    assert took.keys() == {"a", "b"}


def test_the_minimum_of_each_time_is_reported() -> None:
    assert Took(1.0, 4.0).fastest(Took(2.0, 3.0)) == Took(1.0, 3.0)
