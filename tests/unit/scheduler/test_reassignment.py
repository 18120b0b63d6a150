"""Whose work is given to whom, and when."""

from __future__ import annotations

from cotrain_scheduler.reassignment import absences, reassignments
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import WorkerId

NOW = 1_000.0


def alive(name: str, runs: int = 0) -> WorkerSlot:
    worker = WorkerId(name)
    return WorkerSlot(worker, 1, WorkerHeartbeat(worker, 1, "serving", "cpu", 1.0, runs, 0, NOW))


def dead(name: str, epoch: int = 1) -> WorkerSlot:
    return WorkerSlot(WorkerId(name), epoch, None)


def reassigned(*slots: WorkerSlot, empty_for_s: float = 30.0) -> list[tuple[str, str]]:
    since = absences(slots, {}, NOW)
    pairs = reassignments(slots, since, NOW + empty_for_s, after_s=30.0)
    return [(slot.worker, successor) for slot, successor in pairs]


def test_the_living_worker_with_the_fewest_runs_inherits() -> None:
    assert reassigned(dead("a"), alive("b", 5), alive("c", 2), alive("d", 2)) == [("a", "c")]


def test_all_of_the_dead_have_successors_at_once() -> None:
    assert reassigned(dead("a"), alive("b"), dead("c")) == [("a", "b"), ("c", "b")]


def test_nobody_inherits_before_the_time_or_when_nobody_lives() -> None:
    assert reassigned(dead("a"), alive("b"), empty_for_s=29.9) == []
    assert reassigned(dead("a"), dead("b"), empty_for_s=1e6) == []


def test_the_time_starts_when_it_is_first_seen_and_anew_for_each_process() -> None:
    first = absences([dead("a"), alive("b")], {}, NOW)
    assert first == {("a", 1): NOW}
    assert absences([dead("a"), alive("b")], first, NOW + 9) == {("a", 1): NOW}
    assert absences([alive("a"), alive("b")], first, NOW + 9) == {}
    assert absences([dead("a", epoch=2)], first, NOW + 9) == {("a", 2): NOW + 9}
