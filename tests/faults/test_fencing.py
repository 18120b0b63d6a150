"""The fencing check itself, on made-up failpoints."""

from __future__ import annotations

from tests.faults.fencing import accepted_from_replaced

REPLACED = ["worker.entered 1 w0", "worker.before_run 1 a:1", "worker.entered 2 w0"]


def test_a_commit_after_the_successor_entered_is_reported() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(seen) == ["I6 1 committed a:1 after w0 was another's"]


def test_a_fenced_commit_is_accepted_by_the_check() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 2 a:1"]
    assert accepted_from_replaced(seen) == []


def test_a_commit_that_began_earlier_may_be_recorded_later() -> None:
    seen = ["worker.before_commit 1 a:1", "worker.entered 2 w0", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []


def test_a_worker_with_another_id_replaces_no_worker() -> None:
    seen = ["worker.entered 2 w1", "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []
