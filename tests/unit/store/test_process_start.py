"""Refusal of an invalid setting: one sentence with its name and its valid values."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cotrain_store.process_start import EXIT_CODE, CannotListen, address, listen, plain_address, read_settings
from cotrain_store.settings import WorkerSettings

GIVEN = {"REDIS_URL": "unix:///r.sock", "DATA_DIR": str(Path("d")), "BASE_MODEL": "m"}


@pytest.mark.parametrize(
    ("name", "given", "limits"),
    [
        ("MICRO_BATCH_TOKENS", "64", ("'auto'", "256")),
        ("MICRO_BATCH_TOKENS", "many", ("'auto'", "integer")),
        ("MAX_RANK", "5000", ("1024",)),
        ("DEVICE", "tpu", ("'auto', 'cpu' or 'cuda'",)),
        ("SAMPLING_SHARE", "1", ("0.9",)),
        ("DISK_RESERVE_BYTES", "-1", ("0",)),
    ],
)
def test_a_refused_setting_is_named_with_its_valid_values(
    name: str, given: str, limits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (GIVEN | {name: given}).items():
        monkeypatch.setenv(f"COTRAIN_{variable}", value)
    with capture_logs() as lines, pytest.raises(SystemExit) as left:
        read_settings(WorkerSettings)
    assert left.value.code == EXIT_CODE
    reason = lines[0]["reason"]
    assert reason.startswith(f"COTRAIN_{name}: ")
    assert [limit for limit in limits if limit not in reason] == []


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
