from __future__ import annotations

from cotrain_store.blobs.protocol import Unwanted


def test_a_file_is_removed_after_it_was_unwanted_for_long() -> None:
    unwanted = Unwanted(10)
    assert unwanted.old({"a": "1"}, 100) == []
    assert unwanted.old({"a": "1", "b": "1"}, 109) == []
    assert unwanted.old({"a": "1", "b": "1"}, 110) == ["a"]
    assert unwanted.old({"b": "1"}, 119) == ["b"]


def test_the_age_of_a_file_wanted_in_between_restarts() -> None:
    unwanted = Unwanted(10)
    unwanted.old({"a": "1"}, 100)
    unwanted.old({}, 105)
    assert unwanted.is_empty
    assert unwanted.old({"a": "1"}, 110) == []
    assert unwanted.old({"a": "1"}, 120) == ["a"]


def test_the_age_of_a_touched_or_replaced_file_restarts() -> None:
    unwanted = Unwanted(10)
    unwanted.old({"same": "1", "touched": "1"}, 100)
    assert unwanted.old({"same": "1", "touched": "2"}, 110) == ["same"]
    assert unwanted.old({"same": "1", "touched": "2"}, 120) == ["same", "touched"]
