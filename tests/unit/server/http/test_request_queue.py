"""Whose request is read next."""

from __future__ import annotations

from cotrain_server.http.request_queue import ACTIVE_S, Caller, RequestQueue
from cotrain_store.messages.ids import TenantId

FLOOD, A, B, C = (Caller(TenantId(name)) for name in ("flood", "a", "b", "c"))
NOW = 100.0


def wait(queue: RequestQueue[str], caller: Caller, *names: str) -> None:
    for name in names:
        queue.wait(caller, name, NOW)


def test_who_sends_one_request_waits_for_no_more_than_one_of_each_other_caller() -> None:
    queue = RequestQueue[str](at_once=4)
    wait(queue, FLOOD, *(f"flood {number}" for number in range(1_000)))
    wait(queue, A, "a 0")
    wait(queue, B, "b 0", "b 1")
    assert queue.take() == ["flood 0", "a 0", "b 0", "flood 1"]
    assert queue.take() == ["b 1", "flood 2", "flood 3", "flood 4"]


def test_a_caller_that_was_served_is_behind_all_others() -> None:
    queue = RequestQueue[str](at_once=1)
    wait(queue, FLOOD, "flood", "flood")
    wait(queue, A, "a")
    assert queue.take() == ["flood"]
    wait(queue, B, "b")
    assert [queue.take() for _ in range(3)] == [["a"], ["b"], ["flood"]]
    assert not queue


def test_callers_that_come_again_and_again_hold_up_none_that_waits() -> None:
    queue = RequestQueue[str](at_once=1)
    wait(queue, A, "a 0", "a 1")
    wait(queue, B, "b")
    wait(queue, C, "c")
    taken = []
    while "a 1" not in taken:
        if queue.is_round_over:
            queue.begin_round()
        [name] = queue.take()
        taken.append(name)
        if name in {"b", "c"}:
            wait(queue, {"b": B, "c": C}[name], name)
    assert len(taken) <= 2 * 3


def test_nothing_waits_twice_and_nothing_is_lost() -> None:
    queue = RequestQueue[int](at_once=3)
    for number in range(100):
        queue.wait(Caller(None, str(number % 7)), number, NOW)
    taken = []
    while queue:
        taken += queue.take()
    assert sorted(taken) == list(range(100))
    of_one = [number for number in taken if number % 7 == 2]
    assert of_one == sorted(of_one)


def test_between_two_rounds_only_those_are_taken_that_were_not_served() -> None:
    queue = RequestQueue[str](at_once=4)
    wait(queue, FLOOD, *(f"flood {number}" for number in range(10)))
    assert queue.take() == ["flood 0", "flood 1", "flood 2", "flood 3"]
    assert queue.is_round_over
    wait(queue, A, "a 0", "a 1")
    assert not queue.is_round_over
    assert queue.take(only_unserved=True) == ["a 0"]
    assert queue.take(only_unserved=True) == []
    queue.begin_round()
    assert queue.take() == ["flood 4", "a 1", "flood 5", "flood 6"]


def test_who_comes_as_a_round_begins_is_in_it_and_first() -> None:
    queue = RequestQueue[str](at_once=2)
    wait(queue, FLOOD, "flood 0", "flood 1", "flood 2")
    assert queue.take() == ["flood 0", "flood 1"]
    wait(queue, A, "a")
    queue.begin_round()
    assert queue.take() == ["a", "flood 2"]


def test_a_flood_holds_up_those_who_asked_lately_and_wait_for_nothing_here() -> None:
    queue = RequestQueue[str](at_once=1)
    wait(queue, A, "a")
    assert not queue.holds_up_others(NOW)
    wait(queue, FLOOD, "flood", "flood")
    assert queue.take() == ["a"]
    assert queue.holds_up_others(NOW)
    assert queue.holds_up_others(NOW + ACTIVE_S)
    assert not queue.holds_up_others(NOW + ACTIVE_S + 1)


def test_health_checks_and_addresses_without_a_tenant_are_held_up_by_no_flood() -> None:
    queue = RequestQueue[str](at_once=3)
    wait(queue, Caller(None, "10.0.0.1", asks_for_health=True), "health")
    wait(queue, Caller(None, "10.0.0.2"), "page")
    wait(queue, FLOOD, "flood", "flood")
    assert queue.take() == ["health", "page", "flood"]
    assert not queue.holds_up_others(NOW)


def test_what_is_remembered_of_callers_goes() -> None:
    queue = RequestQueue[str](at_once=1)
    for number in range(1_000):
        queue.wait(Caller(TenantId(str(number))), "asked", NOW + number)
        assert queue.take() == ["asked"]
    assert sum(len(vars(queue)[name]) for name in ("_served", "_asked_at")) <= ACTIVE_S + 1
