from __future__ import annotations

import pytest

from cotrain_server.http.middleware import request_id_of


@pytest.mark.parametrize("given", ["a", "3f2a-77.b_c:9", "x" * 64])
def test_a_safe_request_id_is_kept(given: str) -> None:
    assert request_id_of([(b"host", b"h"), (b"x-request-id", given.encode())]) == given


@pytest.mark.parametrize(
    "given", ["", "x" * 65, "a b", "a\tb", 'a"b', "a\n", "é", "a/b", "tml-0123456789abcdef_secret"]
)
def test_an_unsafe_request_id_is_replaced(given: str) -> None:
    made = request_id_of([(b"x-request-id", given.encode("latin-1"))])
    assert made != given
    assert request_id_of([(b"x-request-id", made.encode())]) == made


def test_two_request_ids_are_replaced() -> None:
    assert request_id_of([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) not in ("a", "b")
