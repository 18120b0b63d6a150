"""Who is asking, and how often they may be wrong."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from cotrain_server.errors import TooManyFailures
from cotrain_server.http.auth import FAILURES_PER_MINUTE, FailureCounter, shown_key


def test_ten_failures_in_a_minute_are_counted_and_the_next_is_refused() -> None:
    now = [0.0]
    failures = FailureCounter(lambda: now[0])
    for _ in range(FAILURES_PER_MINUTE):
        failures.note("192.0.2.1")
    with pytest.raises(TooManyFailures):
        failures.note("192.0.2.1")
    failures.note("192.0.2.2")
    now[0] = 61.0
    failures.note("192.0.2.1")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"x-api-key": "tml-a"}, "tml-a"),
        ({"authorization": "Bearer tml-a"}, "tml-a"),
        ({"authorization": "bearer  tml-a "}, "tml-a"),
        ({"x-api-key": "tml-a", "authorization": "Bearer tml-b"}, "tml-a"),
        ({"authorization": "Basic tml-a"}, ""),
        ({"authorization": "tml-a"}, ""),
        ({}, ""),
    ],
)
def test_a_key_comes_in_its_own_header_or_as_a_bearer_token(
    headers: dict[str, str], key: str
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert shown_key(Request({"type": "http", "headers": raw})) == key
