"""Groups into which a step is split after crashes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.engine.ops import Op, OptimStep
from cotrain_workers.recovery.bisection import groups_of, name_of


def ops_of(run: str, count: int) -> list[Op]:
    return [OptimStep(run, seq, 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0) for seq in range(1, count + 1)]


def named(groups: Sequence[Sequence[Op]]) -> list[str]:
    return [name_of(group) for group in groups]


def test_a_step_without_a_crash_stays_whole() -> None:
    assert named(groups_of([*ops_of("a", 2), *ops_of("b", 2)], {"a:1..a:2"})) == ["a:1..b:2"]


def test_a_step_is_split_between_runs_as_near_to_its_middle_as_possible() -> None:
    three = [*ops_of("a", 1), *ops_of("b", 1), *ops_of("c", 4)]
    assert named(groups_of(three, {"a:1..c:4"})) == ["a:1..b:1", "c:1..c:4"]
    assert named(groups_of([*ops_of("a", 5), *ops_of("b", 1)], {"a:1..b:1"})) == ["a:1..a:5", "b:1"]


def test_the_ops_of_one_run_are_halved_in_order() -> None:
    assert named(groups_of(ops_of("a", 5), {"a:1..a:5"})) == ["a:1..a:2", "a:3..a:5"]


def test_a_half_that_crashed_is_split_again_down_to_one_op() -> None:
    crashed = {"a:1..a:4", "a:1..a:2", "a:2"}
    assert named(groups_of(ops_of("a", 4), crashed)) == ["a:1", "a:2", "a:3..a:4"]
    crashed = {"a:1..a:4", "a:3..a:4"}
    assert named(groups_of(ops_of("a", 4), crashed)) == ["a:1..a:2", "a:3", "a:4"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_op_is_in_one_group_and_in_order(counts: list[int], data: st.DataObject) -> None:
    ops = [op for at, count in enumerate(counts) for op in ops_of(f"r{at}", count)]
    crashed: set[str] = set()
    for _ in range(len(ops)):
        groups = groups_of(ops, crashed)
        assert [op for group in groups for op in group] == ops
        crashed.add(name_of(data.draw(st.sampled_from(groups))))
