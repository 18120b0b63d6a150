"""HTTP server in a thread of the test."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Self

from typing_extensions import override

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Handler(BaseHTTPRequestHandler):
    """Handler of the requests of one connection, with `respond` for every method."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond()

    do_HEAD = do_POST = do_DELETE = do_GET  # noqa: N815  # the library's names

    def respond(self) -> None:
        """Answer the request."""
        raise NotImplementedError

    def body(self) -> bytes:
        """Read the body of the request."""
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != http.client.NO_CONTENT:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @override
    def log_message(self, *_: object) -> None:
        """Print nothing."""


class LocalServer:
    """Server on a free port of this host until the end of its block."""

    def __init__(self, handler: type[Handler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
