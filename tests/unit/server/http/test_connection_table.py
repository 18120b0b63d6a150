"""Connections that a process keeps at its limit."""

from __future__ import annotations

import pytest

from cotrain_server.http.connection_table import (
    HEALTH_CONNECTIONS,
    Admission,
    ConnectionTable,
    Limit,
)

LIMITS = 10
FLOODER, OFFICE = "203.0.113.7", "198.51.100.1"


def table(max_of_address: int = 1000) -> ConnectionTable[str]:
    return ConnectionTable(LIMITS, max_of_address, lambda address: address == "127.0.0.1")


def full(of_address: str = FLOODER, *, asking: bool) -> ConnectionTable[str]:
    made = table()
    for number in range(LIMITS):
        assert made.add(f"old {number}", of_address) == (Admission.ALL, None, None)
        if asking:
            made.asks(f"old {number}")
    return made


def test_a_new_connection_replaces_the_one_idle_for_longest() -> None:
    made = full(asking=False)
    made.asks("old 0")
    made.waits("old 0")  # answered, so it is now idle for the shortest time
    assert made.add("new", OFFICE) == (Admission.ALL, "old 1", Limit.PROCESS)
    assert made.add("newer", OFFICE) == (Admission.ALL, "old 2", Limit.PROCESS)
    assert len(made) == LIMITS


def test_a_connection_with_an_open_request_is_not_replaced() -> None:
    made = full(asking=True)
    made.waits("old 5")
    assert made.add("new", OFFICE) == (Admission.ALL, "old 5", Limit.PROCESS)
    assert made.add("newer", OFFICE) == (Admission.ALL, "new", Limit.PROCESS)


def test_health_checks_are_admitted_while_all_connections_are_busy() -> None:
    made = full(asking=True)
    for number in range(HEALTH_CONNECTIONS):
        assert made.add(f"check {number}", OFFICE) == (Admission.HEALTH_ONLY, None, Limit.PROCESS)
    assert made.add("one more", OFFICE) == (Admission.HEALTH_ONLY, "check 0", Limit.PROCESS)
    assert len(made) == LIMITS + HEALTH_CONNECTIONS
    for number in range(1, HEALTH_CONNECTIONS):
        made.asks(f"check {number}")
    made.asks("one more")
    assert made.add("too many", OFFICE) == (Admission.NOTHING, None, Limit.PROCESS)


def test_a_free_place_admits_any_request() -> None:
    made = full(asking=True)
    made.remove("old 3")
    made.remove("old 3")
    assert made.add("new", OFFICE) == (Admission.ALL, None, None)


def test_an_address_at_its_limit_replaces_only_its_own_connections() -> None:
    made = table(max_of_address=3)
    made.add("of another", OFFICE)
    for number in range(3):
        made.add(f"flood {number}", FLOODER)
    assert made.add("flood 3", FLOODER) == (Admission.ALL, "flood 0", Limit.ADDRESS)
    for number in (1, 2, 3):
        made.asks(f"flood {number}")
    assert made.add("flood 4", FLOODER) == (Admission.NOTHING, None, Limit.ADDRESS)
    assert made.add("of another again", OFFICE) == (Admission.ALL, None, None)


def test_an_address_shared_by_many_has_no_limit_of_its_own() -> None:
    made = table(max_of_address=3)
    assert [made.add(str(number), "127.0.0.1")[1] for number in range(LIMITS)] == [None] * LIMITS


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:203.0.113.7", "::ffff:203.0.113.8", False),
    ],
)
def test_ipv6_addresses_of_one_network_share_a_limit(one: str, other: str, is_same: bool) -> None:
    made = table(max_of_address=1)
    made.add("first", one)
    reached = ("first", Limit.ADDRESS) if is_same else (None, None)
    assert made.add("second", other) == (Admission.ALL, *reached)


def test_nothing_is_kept_of_closed_connections() -> None:
    made = full(asking=False)
    for number in range(LIMITS):
        made.remove(f"old {number}")
    made.waits("old 0")  # its answer was in flight
    made.asks("old 1")
    assert len(made) == 0
    assert not any([made._waiting, made._waiting_by_address, made._count_by_address])
