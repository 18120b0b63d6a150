"""Addresses with the wrong scheme: the error suggests the other one, at once if it is certain."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest
from typer.testing import CliRunner

from cotrain import APIConnectionError, BadRequestError, RetryPolicy, ServiceClient, SettingsMissing
from cotrain.cli import command_line
from tests.support.fake_api import FakeApi

AT_ONCE = RetryPolicy(give_up_after_s=0.0)
PLAIN = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Answer every request with these bytes and close the connection. Yield host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer, suppress(OSError):  # the client may have closed it already
                    peer.recv(65_536)
                    peer.sendall(answer)
                    peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=120)


def test_https_to_an_http_server_is_reported_and_not_retried() -> None:
    with answering(PLAIN) as host, ServiceClient(f"https://{host}", "tml-a") as service:
        message = rf"^https://{host} does not speak https: try http://{host}$"
        with pytest.raises(SettingsMissing, match=message):
            service.get_server_capabilities()


def test_top_reports_a_wrong_scheme_too() -> None:
    with answering(PLAIN) as host:
        asked = ["top", "--once", "--base-url", f"https://{host}"]
        result = CliRunner().invoke(command_line([]), asked)
    assert (result.exit_code, f"try http://{host}" in result.output) == (1, True)


def test_http_to_a_server_that_hangs_up_suggests_https() -> None:
    with (
        answering(b"") as host,
        ServiceClient(f"http://{host}", "tml-a", policy=AT_ONCE) as service,
        pytest.raises(APIConnectionError, match=f"If it speaks https, try https://{host}"),
    ):
        service.get_server_capabilities()


def test_http_to_an_https_proxy_suggests_https() -> None:
    page = "<html>400 The plain HTTP request was sent to HTTPS port</html>"
    refusal = httpx.Response(400, text=page, headers={"Content-Type": "text/html"})
    api = FakeApi(answers={"get_server_capabilities": [refusal]})
    with (
        ServiceClient("http://proxy:8443", "tml-a", network=api.network) as service,
        pytest.raises(BadRequestError, match=r"Bad Request; try https://proxy:8443$"),
    ):
        service.get_server_capabilities()
