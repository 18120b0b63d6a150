from __future__ import annotations

import pytest

from cotrain_workers.recovery.snapshot_policy import (
    LOG_ENTRIES,
    ReplayBacklog,
    SnapshotPolicy,
)

NOW = 1_000.0
POLICY = SnapshotPolicy(replay_s=30.0, ops=10, bytes=1_000, idle_s=60.0, evict_idle_s=120.0)


def test_committed_ops_add_up() -> None:
    backlog = ReplayBacklog(seq=3)
    backlog.add(4, size=100, compute_s=1.5, now=NOW)
    backlog.add(5, size=50, compute_s=0.5, now=NOW + 1)
    backlog.pass_by(6, now=NOW + 2)
    assert backlog == ReplayBacklog(6, ops=2, bytes=150, compute_s=2.0, used_at=NOW + 2, entries=3)


@pytest.mark.parametrize(
    ("backlog", "is_due"),
    [
        (ReplayBacklog(5, ops=1, used_at=NOW), False),
        (ReplayBacklog(5, ops=9, bytes=999, compute_s=29.9, used_at=NOW - 59), False),
        (ReplayBacklog(5, ops=10, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, bytes=1_000, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, compute_s=30.0, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, compute_s=30.0, used_at=NOW, copy_s=3.0), True),
        (ReplayBacklog(5, ops=1, compute_s=30.0, used_at=NOW, copy_s=3.1), False),
        (ReplayBacklog(5, ops=1, compute_s=31.0, used_at=NOW, copy_s=3.1), True),
        (ReplayBacklog(5, ops=1, used_at=NOW - 60), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 9_999), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES - 1, used_at=NOW), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES, used_at=NOW), True),
    ],
)
def test_a_copy_is_due_when_a_replay_would_cost_too_much_or_the_run_rests(
    backlog: ReplayBacklog, is_due: bool
) -> None:
    assert POLICY.needs_snapshot(backlog, NOW) == is_due


@pytest.mark.parametrize(
    ("backlog", "may"),
    [
        (ReplayBacklog(5, ops=0, used_at=NOW - 120), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 119), False),
        (ReplayBacklog(5, ops=1, used_at=NOW - 9_999), False),
    ],
)
def test_a_run_leaves_memory_when_it_rested_long_and_has_nothing_to_replay(
    backlog: ReplayBacklog, may: bool
) -> None:
    assert POLICY.may_evict(backlog, NOW) == may


def test_a_run_with_something_to_replay_is_copied_out_before_it_may_leave() -> None:
    assert POLICY.idle_s < POLICY.evict_idle_s
    backlog = ReplayBacklog(5, ops=1, used_at=NOW)
    later = NOW + POLICY.evict_idle_s
    assert POLICY.needs_snapshot(backlog, later)
    assert not POLICY.may_evict(backlog, later)
