"""What is said of a schedule's fairness, and from when on."""

from __future__ import annotations

from bench.pool.measures import LEAST_TURNS, Turns, equal_shares

QUANTUM = 2_000


def played(turns: int) -> Turns:
    """Serve two tenants alike, one of them always half a quantum ahead of its share."""
    found = Turns(QUANTUM)
    heads = {"a": {"a0": QUANTUM}, "b": {"b0": QUANTUM}}
    found.note(heads, {"a": 3 * QUANTUM // 2, "b": QUANTUM // 2}, ["a0", "b0"])
    for _ in range(turns - 1):
        found.note(heads, {"a": QUANTUM, "b": QUANTUM}, ["a0", "b0"])
    return found


def test_what_a_tenant_is_off_does_not_add_up_and_its_part_in_the_index_fades() -> None:
    assert [played(turns).farthest_off for turns in (1, LEAST_TURNS, 100)] == [0.5] * 3
    assert played(1).jain() < 0.9
    assert played(LEAST_TURNS).jain() > 0.995


def test_an_unfair_schedule_is_farther_off_with_every_turn() -> None:
    found = Turns(QUANTUM)
    for _ in range(10):
        found.note({"a": {"a0": 2_000}, "b": {"b0": 2_000}}, {"a": 1_500, "b": 500}, ["a0", "b0"])
    assert found.farthest_off == 2.5
    assert found.jain() < 0.9


def test_what_a_tenant_does_not_want_the_others_divide() -> None:
    assert equal_shares(90, {"a": 100, "b": 10, "c": 100}) == {"b": 10, "a": 40, "c": 40}
    assert equal_shares(90, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
