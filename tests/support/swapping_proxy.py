"""Proxy that answers some requests itself, such as a login page or a maintenance notice in front of a server."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

from typing_extensions import override

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Swapped:
    """Answer of the proxy in place of the server's."""

    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_passed_on: bool = False
    """True if the server receives the request nevertheless."""


PAGE = {"Content-Type": "text/html"}
FOREIGN = {
    "login": Swapped(content=b"<html>log in</html>", headers=PAGE),
    "login after the server": Swapped(content=b"<html>", headers=PAGE, is_passed_on=True),
    "redirect": Swapped(302, headers={"Location": "https://sso.example/login"}),
    "loop": Swapped(307, headers={"Location": "/api/v1/forward_backward"}),
    "maintenance": Swapped(content=b'{"status": "maintenance"}'),
    "empty": Swapped(),
    "cut": Swapped(content=b'{"request_id": "a', is_passed_on=True),
    "text": Swapped(content=b"back soon", headers={"Content-Type": "text/plain"}),
    "list": Swapped(content=b"[]"),
}


class SwappingProxy:
    """Proxy in front of `upstream`, below `prefix`. `swaps` has its own answers, used in order."""

    def __init__(self, upstream: str, prefix: str = "") -> None:
        self.swaps: dict[str, list[Swapped]] = {}
        """Endpoint → answers to its next requests."""
        self.prefix = prefix
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, upstream))
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self) -> str:
        """Base URL of the proxy."""
        return f"http://127.0.0.1:{self._server.server_port}{self.prefix}"

    def next_swap(self, endpoint: str) -> Swapped | None:
        """Return and remove the next answer to an endpoint, or None."""
        with self._lock:
            waiting = self.swaps.get(endpoint)
            return waiting.pop(0) if waiting else None


def _handler(proxy: SwappingProxy, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"] or 0)))

        def do_GET(self) -> None:
            self._answer(b"")

        do_DELETE = do_GET  # noqa: N815  # the library's name

        def _answer(self, body: bytes) -> None:
            path = self.path.removeprefix(proxy.prefix) or "/"
            swap = proxy.next_swap(urlsplit(path).path.removeprefix("/api/v1/"))
            if swap is None:
                answer = self._passed_on(path, body)
            else:
                answer = swap
                if swap.is_passed_on:
                    self._passed_on(path, body)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.status != http.client.NO_CONTENT:
                self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def _passed_on(self, path: str, body: bytes) -> Swapped:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=60)
            try:
                connection.request(self.command, path, body, headers)
                response = connection.getresponse()
                kept = {k: v for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP}
                return Swapped(response.status, response.read(), kept)
            finally:
                connection.close()

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    return Handler
