"""Listening addresses of a server, and the errors of unusable ones."""

from __future__ import annotations

import contextlib
import socket

import pytest

from cotrain_store.listening import CannotListen, address, listen, plain_address


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def is_answered(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=60):
        return True
    return False


@needs_ipv6
def test_the_address_of_all_interfaces_accepts_ipv4_and_ipv6() -> None:
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        assert [is_answered(host, port) for host in ("127.0.0.1", "::1")] == [True, True]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0] as taken:
            assert plain_address(taken.getpeername()[0]) == "127.0.0.1"


@needs_ipv6
def test_a_single_address_accepts_only_its_own_protocol() -> None:
    for host, other in (("::1", "127.0.0.1"), ("127.0.0.1", "::1"), ("localhost", "::1")):
        with listen(host, 0) as listener:
            port = listener.getsockname()[1]
            assert [is_answered(each, port) for each in (host, other)] == [True, False]


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("nowhere.invalid", 8000, "nowhere.invalid:8000: this host knows no such name"),
        ("a..b", 8000, "a..b:8000: this host knows no such name"),
        ("192.0.2.1", 8000, "192.0.2.1:8000: it is no address of this host"),
        ("", 8000, ":8000: no host was given"),
        ("127.0.0.1", 80000, "127.0.0.1:80000: a port is 0 to 65535"),
    ],
)
def test_an_unusable_address_is_reported_with_the_reason(host: str, port: int, says: str) -> None:
    with pytest.raises(CannotListen, match=f"^Cannot listen on {says}"):
        listen(host, port)


def test_a_port_in_use_is_reported() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_addresses_are_formatted_as_in_urls() -> None:
    assert address("::1", 80) == "[::1]:80"
    assert address("host", 80) == "host:80"
    assert [plain_address(each) for each in ("::ffff:10.0.0.1", "::1", "10.0.0.1", "fe80::1")] == [
        "10.0.0.1", "::1", "10.0.0.1", "fe80::1",
    ]  # fmt: skip
