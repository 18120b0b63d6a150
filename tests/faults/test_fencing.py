"""Who still wrote where another process had taken over."""

from __future__ import annotations

from tests.faults.fencing import accepted_from_replaced

REPLACED = ["worker.entered 1 w0", "worker.before_run 1 a:1", "worker.entered 2 w0"]


def test_a_commit_begun_after_another_entered_is_told() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(seen) == ["I6 1 committed a:1 after w0 was another's"]


def test_one_that_is_fenced_off_is_in_order() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 2 a:1"]
    assert accepted_from_replaced(seen) == []


def test_one_begun_before_may_be_noted_after() -> None:
    seen = ["worker.before_commit 1 a:1", "worker.entered 2 w0", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []


def test_a_worker_of_another_place_replaces_nobody() -> None:
    seen = ["worker.entered 2 w1", "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []
