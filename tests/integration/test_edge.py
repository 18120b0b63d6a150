"""Edge of the compose file: HAProxy in front of a real API process. Skipped without HAProxy."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.support import processes as edges
from cotrain_server.limits import WRONG_KEYS_PER_MINUTE
from tests.integration.test_http_attacks import Address, answers, api_process
from tests.support.http_api import ALICE
from tests.support.redis_server import EmbeddedRedis

pytestmark = pytest.mark.skipif(edges.find_haproxy() is None, reason="haproxy is not installed")

KEY_REQUESTS, ADDRESS_CONNECTIONS, MAX_BODY_BYTES = 3, 4, 100_000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", "tls.key", "-out", "tls.crt"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "tls.crt"


@pytest.mark.parametrize("has_tls", [False, True])
def test_haproxy_accepts_the_configuration(has_tls: bool, certificate: Path) -> None:
    variables = {"EDGE_CERTIFICATE": str(certificate)} if has_tls else {}
    haproxy = edges.find_haproxy()
    assert haproxy
    done = subprocess.run([haproxy, "-c", "-f", edges.CONFIG], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.fixture
def direct(empty_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[Address]:
    """Address of an API process that trusts the edge."""
    with api_process(empty_redis.url, tmp_path, TRUSTED_PROXIES="127.0.0.1") as address:
        yield address


def test_the_edge_limits_clients_and_states_their_address(
    direct: Address, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tmp_path / "haproxy.cfg"
    text = edges.CONFIG.read_text()
    assert "timeout http-request 30s" in text
    quick.write_text(text.replace("timeout http-request 30s", "timeout http-request 1s"))
    monkeypatch.setattr(edges, "CONFIG", quick)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tls_port = taken.getsockname()[1]
    variables = {
        "EDGE_KEY_REQUESTS": KEY_REQUESTS, "EDGE_ADDRESS_CONNECTIONS": ADDRESS_CONNECTIONS,
        "EDGE_MAX_BODY_BYTES": MAX_BODY_BYTES, "EDGE_CERTIFICATE": certificate,
        "EDGE_LISTEN_TLS": f"127.0.0.1:{tls_port}",
    }  # fmt: skip
    with edges.edge(f"http://{direct[0]}:{direct[1]}", **variables) as url, httpx.Client(base_url=url) as http:
        # The API counts wrong keys of the client's address, which the edge states.
        forged = [
            {"X-API-Key": f"tml-guess{number}", "X-Forwarded-For": f"192.0.2.{number}"}
            for number in range(WRONG_KEYS_PER_MINUTE + 1)
        ]
        statuses = [http.get("/status", headers=headers).status_code for headers in forged]
        assert statuses == [401] * WRONG_KEYS_PER_MINUTE + [429]

        # Of both headers, the API and the edge read the same one.
        keys = {"X-API-Key": ALICE, "Authorization": "Bearer tml-other"}
        path = "/api/v1/get_server_capabilities"
        served = [http.get(path, headers=keys)]
        while served[-1].status_code == 200 and len(served) < 100:
            served.append(http.get(path, headers=keys))
        assert served[-1].status_code == 429
        assert len(served) > KEY_REQUESTS
        assert served[-1].headers["retry-after"] == "1"
        assert served[-1].json()["code"] == "too_many_requests"
        assert http.get("/healthz").status_code == 200  # without a key

        large = http.post("/api/v1/telemetry", content=bytes(MAX_BODY_BYTES + 1))
        assert (large.status_code, large.json()["code"]) == (413, "too_large")

        # A head or a small body that does not arrive never reaches the API.
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)
        for part in (b"GET / HTTP/1.1\r\nHost: x\r\n", SLOW):
            assert answers(address, part).startswith(b"HTTP/1.1 408 ")

        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"https://127.0.0.1:{tls_port}/healthz", verify=trusted).status_code == 200

        # An admitted connection without a request ends with 408, a refused one with nothing. At first the edge may
        # still count the connection that the client has just closed.
        http.close()
        admitted, ends = 0, list[bytes]()
        for _ in range(5):
            ends = [_last_words(held) for held in [socket.create_connection(address) for _ in range(40)]]
            admitted = sum(end.startswith(b"HTTP/1.1 408 ") for end in ends)
            if admitted >= ADDRESS_CONNECTIONS:
                break
        assert ends.count(b"") > 0
        assert admitted >= ADDRESS_CONNECTIONS


def _last_words(connection: socket.socket) -> bytes:
    """Return the bytes that a silent connection receives before it is closed."""
    with connection, contextlib.suppress(ConnectionResetError):
        return connection.recv(1000)
    return b""


SLOW = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


def test_the_edge_answers_in_json_without_an_api() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with edges.edge(f"http://{address[0]}:{address[1]}") as url:
        answer = httpx.get(url, timeout=60)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.text)["code"] == "unavailable"
