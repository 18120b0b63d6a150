"""Placement of a run on a member of a group."""

from __future__ import annotations

import pytest

from cotrain_workers.group.engine import lightest


@pytest.mark.parametrize(("loads", "member"), [([0, 0, 0], 0), ([5, 3, 4], 1), ([5, 3, 3], 1), ([7], 0)])
def test_a_run_goes_to_the_first_member_with_the_least_load(loads: list[int], member: int) -> None:
    assert lightest(loads) == member
