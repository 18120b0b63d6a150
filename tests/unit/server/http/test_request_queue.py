"""Whose request is read next."""

from __future__ import annotations

from cotrain_server.http.request_queue import RequestQueue
from cotrain_store.messages.ids import TenantId

A, B = TenantId("a"), TenantId("b")


def test_who_sends_one_request_waits_for_no_more_than_one_of_each_other_caller() -> None:
    queue = RequestQueue[str](at_once=4)
    for number in range(1_000):
        queue.wait("flood", f"flood {number}")
    queue.wait(A, "a 0")
    queue.wait(B, "b 0")
    queue.wait(B, "b 1")
    assert queue.take() == ["flood 0", "a 0", "b 0", "flood 1"]
    assert queue.take() == ["b 1", "flood 2", "flood 3", "flood 4"]


def test_a_caller_whose_turn_has_been_is_behind_all_others() -> None:
    queue = RequestQueue[str](at_once=1)
    for caller in ("flood", "flood", "other"):
        queue.wait(caller, caller)
    assert queue.take() == ["flood"]
    queue.wait("third", "third")
    assert [queue.take() for _ in range(3)] == [["other"], ["flood"], ["third"]]
    assert not queue


def test_nothing_waits_twice_and_nothing_is_lost() -> None:
    queue = RequestQueue[int](at_once=3)
    for number in range(100):
        queue.wait(number % 7, number)
    taken = []
    while queue:
        taken += queue.take()
    assert sorted(taken) == list(range(100))
    of_one = [number for number in taken if number % 7 == 2]
    assert of_one == sorted(of_one)
