"""Policy of recovery copies: when a copy is due, and when a run leaves memory."""

from __future__ import annotations

import pytest

from cotrain_store.messages.ids import RunId
from cotrain_workers.recovery.recovery_copies import LOG_ENTRIES, ReplayBacklog, ReplayCost, SnapshotPolicy

NOW = 1_000.0


POLICY = SnapshotPolicy(replay_s=30.0, ops=10, bytes=1_000, idle_s=60.0, evict_idle_s=120.0)


def test_committed_ops_are_summed() -> None:
    backlog = ReplayBacklog(seq=3)
    backlog.add(4, size=100, compute_s=1.5, replay_s=3.0, now=NOW)
    backlog.add(5, size=50, compute_s=0.5, replay_s=1.0, now=NOW + 1)
    backlog.pass_by(6, now=NOW + 2)
    assert backlog == ReplayBacklog(6, ops=2, bytes=150, compute_s=2.0, replay_s=4.0, used_at=NOW + 2, entries=3)


@pytest.mark.parametrize(
    ("backlog", "is_due"),
    [
        (ReplayBacklog(5, ops=1, used_at=NOW), False),
        (ReplayBacklog(5, ops=9, bytes=999, compute_s=99.0, replay_s=29.9, used_at=NOW - 59), False),
        (ReplayBacklog(5, ops=10, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, bytes=1_000, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW, copy_s=7.5), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW, copy_s=7.6), False),
        (ReplayBacklog(5, ops=1, replay_s=31.0, used_at=NOW, copy_s=7.6), True),
        (ReplayBacklog(5, ops=1, is_due=True, used_at=NOW), True),
        (ReplayBacklog(5, ops=0, is_due=True, used_at=NOW), False),
        (ReplayBacklog(5, ops=1, used_at=NOW - 60), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 9_999), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES - 1, used_at=NOW), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES, used_at=NOW), True),
    ],
)
def test_a_snapshot_is_due_if_its_replay_is_costly_or_the_run_is_idle(backlog: ReplayBacklog, is_due: bool) -> None:
    assert POLICY.needs_snapshot(backlog, NOW) == is_due


@pytest.mark.parametrize(
    ("backlog", "may"),
    [
        (ReplayBacklog(5, ops=0, used_at=NOW - 120), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 119), False),
        (ReplayBacklog(5, ops=1, used_at=NOW - 9_999), False),
    ],
)
def test_a_run_is_evicted_after_idling_long_without_a_replay_backlog(backlog: ReplayBacklog, may: bool) -> None:
    assert POLICY.may_evict(backlog, NOW) == may


def test_a_run_with_a_replay_backlog_is_copied_before_its_eviction() -> None:
    assert POLICY.idle_s < POLICY.evict_idle_s
    backlog = ReplayBacklog(5, ops=1, used_at=NOW)
    later = NOW + POLICY.evict_idle_s
    assert POLICY.needs_snapshot(backlog, later)
    assert not POLICY.may_evict(backlog, later)


def test_a_small_pass_among_many_has_the_cost_of_a_pass_alone() -> None:
    cost = ReplayCost(pass_s=0.08, step_s=0.02)
    assert cost.alone_s(0.03, 1 / 64, is_pass=True) == pytest.approx(0.03 + 0.08 * 63 / 64)
    assert cost.alone_s(0.03, 1 / 64, is_pass=False) == pytest.approx(0.03 + 0.02 * 63 / 64)


def test_a_pass_alone_in_its_cycle_has_the_same_cost_again() -> None:
    assert ReplayCost(pass_s=0.08).alone_s(1.3, 1.0, is_pass=True) == 1.3
    # It took several cycles, and more than the last one.
    assert ReplayCost(pass_s=0.08).alone_s(5.0, 4.0, is_pass=True) == 5.0


def some_runs(*replay_s: float, **more: float) -> dict[RunId, ReplayBacklog]:
    return {
        RunId(f"r{at}"): ReplayBacklog(5, ops=1, replay_s=each, used_at=NOW, **more)  # type: ignore[arg-type]
        for at, each in enumerate(replay_s)
    }


def test_the_costliest_runs_are_copied_until_the_total_is_in_bounds() -> None:
    assert POLICY.runs_due(some_runs(*[0.5] * 44), NOW) == []
    assert POLICY.runs_due(some_runs(*[0.5] * 45), NOW) == ["r0"]
    assert POLICY.runs_due(some_runs(1.0, 9.0, 6.0, 9.5, 8.0), NOW) == ["r3", "r1"]


def test_a_run_with_a_slow_copy_is_not_copied_for_the_others() -> None:
    quick = ReplayBacklog(5, ops=1, replay_s=5.0, used_at=NOW)
    runs = some_runs(9.0, 9.1, copy_s=2.3) | {RunId("quick"): quick}
    assert POLICY.runs_due(runs, NOW) == ["quick"]


def test_an_idle_run_is_copied_at_any_total_cost() -> None:
    runs = some_runs(1.0) | {RunId("rests"): ReplayBacklog(5, ops=1, used_at=NOW - 60)}
    assert POLICY.runs_due(runs, NOW) == ["rests"]
