"""Raw bytes to the API process, as sent by an attacker or forwarded by a proxy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cotrain_server.limits import FAILURES_PER_MINUTE
from tests.support.http_api import ALICE
from tests.support.redis_server import EmbeddedRedis
from tests.warm.popen import Popen, run

PATIENCE_S = 120.0
Address = tuple[str, int]


@contextmanager
def api_process(redis_url: str, folder: Path, **settings: str) -> Iterator[Address]:
    """Run `python -m cotrain_server`; connections wait in its socket until it accepts them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = {
            "REDIS_URL": redis_url, "DATA_DIR": str(folder), "API_KEYS": ALICE,
            **settings,
        }  # fmt: skip
        environment = {**os.environ, **{f"COTRAIN_{name}": value for name, value in given.items()}}
        command = [sys.executable, "-m", "cotrain_server", "--listen-fd", str(listener.fileno())]
        process = Popen(command, env=environment, pass_fds=(listener.fileno(),))
        try:
            yield listener.getsockname()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def answers(address: Address, request: bytes) -> bytes:
    """Send bytes. Return everything received until the server closes the connection."""
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(request)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def status_of(address: Address, path: str, *headers: str, version: str = "1.1") -> int:
    lines = [f"GET {path} HTTP/{version}", *headers, "Connection: close", "", ""]
    return int(answers(address, "\r\n".join(lines).encode()).split()[1])


def test_ambiguous_or_spoofed_requests_are_rejected(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    with api_process(empty_redis.url, tmp_path) as address:
        smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        for route in (b"/healthz", b"/api/v1/client/config"):
            twice = (
                b"POST " + route + b" HTTP/1.1\r\nHost: x\r\nX-API-Key: " + ALICE.encode() + b"\r\n"
                b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            )
            answer = answers(address, twice + smuggled)
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert answer.count(b"HTTP/1.1") == 1, answer

        # A proxy without headers of its own: nginx with nothing but `proxy_pass`.
        host = f"Host: 127.0.0.1:{address[1]}"
        for version in ("1.0", "1.1"):
            assert status_of(address, "/metrics", host, version=version) == 404
            assert status_of(address, "/status", host, version=version) == 401
        key = (tmp_path / "admin-key").read_text().strip()
        for path in ("/metrics", "/status"):
            assert status_of(address, path, host, f"X-API-Key: {key}") == 200


@pytest.mark.parametrize(("trusted", "last"), [("", 429), ("127.0.0.1", 401)])
def test_only_trusted_proxies_may_set_the_client_address(
    empty_redis: EmbeddedRedis, tmp_path: Path, trusted: str, last: int
) -> None:
    with api_process(empty_redis.url, tmp_path, TRUSTED_PROXIES=trusted) as address:
        statuses = [
            status_of(
                address, "/status", "Host: x", "X-API-Key: tml-guessed",
                f"X-Forwarded-For: 192.0.2.{number}",
            )
            for number in range(FAILURES_PER_MINUTE + 1)
        ]  # fmt: skip
        assert statuses == [401] * FAILURES_PER_MINUTE + [last]
        assert status_of(address, "/api/v1/get_server_capabilities", "Host: x", f"X-API-Key: {ALICE}") == 200


def test_an_api_process_starts_no_math_threads() -> None:
    script = """if True:
        import os, sys
        import cotrain_server.__main__
        assert "numpy" in sys.modules
        print(len(os.listdir("/proc/self/task")))
    """
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_short_key_in_the_settings_stops_the_process_with_a_sentence(
    empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    for name, value in (("ADMIN_KEY", "fifteen-letters"), ("API_KEYS", "tml-dev_d3v"), ("PORT", "x")):
        environment = {
            **os.environ, "COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path),
            f"COTRAIN_{name}": value,
        }  # fmt: skip
        done = run([sys.executable, "-m", "cotrain_server"], env=environment)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert json.loads(line)["event"] == "settings_refused"
        assert f"COTRAIN_{name}" in line
        assert value == "x" or value not in line
