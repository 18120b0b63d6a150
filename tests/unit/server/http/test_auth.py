"""API key of a request."""

import pytest
from starlette.requests import Request

from cotrain_server.http.auth import shown_key


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
def test_a_key_is_read_from_its_own_header_or_a_bearer_token(headers: dict[str, str], key: str) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert shown_key(Request({"type": "http", "headers": raw})) == key
