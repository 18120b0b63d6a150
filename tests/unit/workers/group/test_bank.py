"""Which member of a group gets a run."""

from __future__ import annotations

import pytest

from cotrain_workers.group.bank import lightest


@pytest.mark.parametrize(
    ("loads", "member"), [([0, 0, 0], 0), ([5, 3, 4], 1), ([5, 3, 3], 1), ([7], 0)]
)
def test_the_member_with_the_least_gets_the_next_run_and_of_equal_ones_the_first(
    loads: list[int], member: int
) -> None:
    assert lightest(loads) == member
