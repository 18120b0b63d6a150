"""Limit of wrong keys per address.

Tenant of a request, guessed from its first bytes.
"""

from __future__ import annotations

import pytest

from cotrain_server.errors import TooManyFailures
from cotrain_server.limits.failures import FAILURES_PER_MINUTE, FailureCounter, KnownCredentials
from cotrain_store.messages.ids import TenantId


def test_the_eleventh_failure_in_a_minute_is_refused() -> None:
    now = [0.0]
    failures = FailureCounter(lambda: now[0])
    for _ in range(FAILURES_PER_MINUTE):
        failures.note("192.0.2.1")
    with pytest.raises(TooManyFailures):
        failures.note("192.0.2.1")
    failures.note("192.0.2.2")
    now[0] = 61.0
    failures.note("192.0.2.1")


A, B = TenantId("a"), TenantId("b")
KEY = b"GET /x HTTP/1.1\r\nHost: h\r\n%s\r\n\r\n"


@pytest.mark.parametrize(
    "header",
    [
        b"X-API-Key: tml-one",
        b"x-api-key:tml-one ",
        b"Authorization: Bearer tml-one",
        b"authorization: bearer  tml-one",
        b"Authorization: Bearer tml-two\r\nX-Api-Key: tml-one",
        b"X-Api-Key: tml-one\r\nAuthorization: Bearer tml-two",
    ],
)
def test_a_tenant_is_found_by_its_credential_in_any_header(header: bytes) -> None:
    known = KnownCredentials()
    known.learn("tml-one", A)
    known.learn("tml-two", B)
    assert known.tenant_of(KEY % header) == A


@pytest.mark.parametrize(
    "head",
    [
        b"",
        KEY % b"X-Api-Key: tml-other",
        KEY % b"X-Other: tml-one",
        KEY % b"Cookie: x-api-key: tml-one",
        KEY % b"" + b"\r\nX-Api-Key: tml-one\r\n",  # in the body
        b"GET /x HTTP/1.1\r\nX-Api-K",
    ],
)
def test_an_unused_credential_finds_no_tenant(head: bytes) -> None:
    known = KnownCredentials()
    known.learn("tml-one", A)
    assert known.tenant_of(head) is None


def test_the_number_of_remembered_credentials_is_limited() -> None:
    known = KnownCredentials(most=2)
    for name in ("one", "two", "one", "three"):
        known.learn(f"tml-{name}", TenantId(name))
    found = [known.tenant_of(KEY % f"X-Api-Key: tml-{n}".encode()) for n in ("one", "two", "three")]
    assert found == ["one", None, "three"]
