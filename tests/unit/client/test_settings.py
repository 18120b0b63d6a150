"""Server address, key, proxies and certificates, and the errors if they are unusable."""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cotrain import ServiceClient
from cotrain.errors import APIConnectionError, SettingsMissing
from cotrain.settings import CERTIFICATES, client_settings, proxy_of, through_proxy, trusted
from cotrain.transport.responses import RetryPolicy

PROXY = "http://proxy:3128"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variables of proxies and certificates from the environment."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in CERTIFICATES:
            monkeypatch.delenv(name)
    trusted.cache_clear()
    yield
    trusted.cache_clear()


def test_the_server_address_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_BASE_URL", "http://elsewhere:1/")
    monkeypatch.setenv("COTRAIN_API_KEY", "tml-a_b")
    settings = client_settings()
    assert (settings.base_url, settings.api_key) == ("http://elsewhere:1", "tml-a_b")
    assert client_settings("http://here").base_url == "http://here"
    assert "tml-a_b" not in repr(settings)


@pytest.mark.parametrize("url", ["gpu-host:8000", "127.0.0.1", "ftp://gpu-host", "http://", {"a": 1}, 8000])
def test_an_invalid_address_is_refused_at_once(url: Any) -> None:
    with pytest.raises(SettingsMissing, match=r"must be like http://127.0.0.1:8000, not "):
        ServiceClient(url, "tml-key")


def test_white_space_around_an_address_or_a_key_is_removed() -> None:
    here = client_settings("http://here", "tml-a")
    for address in (" http://here/ ", "http://here/api/v1", "http://here/api/v1/"):
        assert client_settings(address, "tml-a\n") == here


@pytest.mark.parametrize("key", ["tml-ü", "tml-a\nb", b"tml-a"])
def test_a_key_with_invalid_characters_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(SettingsMissing, match="visible ASCII") as refused:
        client_settings("http://here", key)
    assert "tml" not in str(refused.value)


def test_a_client_without_a_key_raises_with_how_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTRAIN_API_KEY", raising=False)
    with pytest.raises(SettingsMissing, match="COTRAIN_API_KEY"):
        client_settings()


@pytest.mark.parametrize(
    ("excepted", "url", "is_excepted"),
    [
        ("localhost,fd07:b51a:cc66:f0::/64", "http://[fd07:b51a:cc66:f0::9]:8000", True),
        ("localhost,fd07:b51a:cc66:f0::/64", "http://[fd08::9]:8000", False),
        ("localhost,[::1]", "http://[::1]:8000", True),
        ("::1", "http://[::1]", True),
        ("[fd07::]/16", "http://[fd07::3]", True),
        ("192.168.0.0/16", "http://192.168.4.5:8000", True),
        ("192.168.0.0/16", "http://192.169.4.5:8000", False),
        ("10.0.0.1", "http://10.0.0.1", True),
        ("10.0.0.1:81", "http://10.0.0.1:81", True),
        ("10.0.0.1:81", "http://10.0.0.1:80", False),
        (".example.com", "http://train.example.com", True),
        ("*.example.com", "http://train.example.com", True),
        ("example.com", "http://example.com", True),
        ("example.com", "http://notexample.com", False),
        ("a, LOCALHOST", "http://localhost:1", True),
        ("http://localhost", "http://localhost:1", True),
        ("*", "http://anything", True),
        ("", "http://anything", False),
        ("not/a/network,::,fe80::1%eth0,[", "http://anything", False),
    ],
)
def test_a_host_in_no_proxy_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, excepted: str, url: str, is_excepted: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", excepted)
    assert proxy_of(url) == (None if is_excepted else PROXY)
    ServiceClient(url, "k").close()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("value", ["foo://x:1", "http://[::1", "http://x:port", "socks5://user:pw@x:1"])
def test_an_invalid_proxy_is_reported_by_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsMissing, match=name) as refused:
        ServiceClient("http://train.example", "k")
    assert "pw" not in str(refused.value)


def test_an_unreachable_proxy_is_named_in_the_connection_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:pw@127.0.0.1:9")
    assert "http://127.0.0.1:9 of HTTP_PROXY" in through_proxy("http://train.example")
    policy = RetryPolicy(give_up_unanswered_after_s=-1.0)
    with (
        ServiceClient("http://train.example", "k", policy=policy) as service,
        pytest.raises(APIConnectionError, match=r"through the proxy http://127.0.0.1:9 of HTTP_PROXY"),
    ):
        service.get_server_capabilities()


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_missing_certificate_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv(name, str(tmp_path / "gone.pem"))
    with pytest.raises(SettingsMissing, match=rf"{name} names .*gone.pem.*no such file"):
        ServiceClient("http://train.example", "k")


def test_a_file_without_certificates_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("hello")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no.pem"))
    with pytest.raises(SettingsMissing, match=r"SSL_CERT_FILE names .*no.pem"):
        ServiceClient("http://train.example", "k")


def test_a_certificate_of_an_unknown_authority_is_refused_at_once(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = ThreadingHTTPServer(("localhost", 0), SimpleHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://localhost:{server.server_port}"
    try:
        with ServiceClient(url, "k") as service, pytest.raises(SettingsMissing, match="SSL_CERT_FILE"):
            service.get_server_capabilities()
    finally:
        server.shutdown()
        server.server_close()
