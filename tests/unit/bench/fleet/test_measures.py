"""Fairness measures of a schedule: distance from the equal share, and Jain's index."""

from __future__ import annotations

from bench.fleet.measures import LEAST_TURNS, Turns, equal_shares

QUANTUM = 2_000


def played(turns: int) -> Turns:
    """Serve two tenants equally, one of them always half a quantum ahead of its share."""
    found = Turns(QUANTUM)
    heads = {"a": {"a0": QUANTUM}, "b": {"b0": QUANTUM}}
    found.note(heads, {"a": 3 * QUANTUM // 2, "b": QUANTUM // 2}, ["a0", "b0"])
    for _ in range(turns - 1):
        found.note(heads, {"a": QUANTUM, "b": QUANTUM}, ["a0", "b0"])
    return found


def test_a_constant_lead_does_not_accumulate_and_fades_from_the_index() -> None:
    assert [played(turns).farthest_off for turns in (1, LEAST_TURNS, 100)] == [0.5] * 3
    assert played(1).jain() < 0.9
    assert played(LEAST_TURNS).jain() > 0.995


def test_the_distance_of_an_unfair_schedule_grows_with_every_turn() -> None:
    found = Turns(QUANTUM)
    for _ in range(10):
        found.note({"a": {"a0": 2_000}, "b": {"b0": 2_000}}, {"a": 1_500, "b": 500}, ["a0", "b0"])
    assert found.farthest_off == 2.5
    assert found.jain() < 0.9


def test_a_share_that_a_tenant_leaves_is_divided_among_the_others() -> None:
    assert equal_shares(90, {"a": 100, "b": 10, "c": 100}) == {"b": 10, "a": 40, "c": 40}
    assert equal_shares(90, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
