"""Proxy that forwards each request and loses its first answer."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

from typing_extensions import override

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
# SDK 0.38 gives the sampler of a save a new number each time it sends the same save.
RENUMBERED = re.compile(rb'"sampling_session_seq_id":\s*\d+')
# An address reserved for documentation, so that the server sees a remote client.
FAR_AWAY = "203.0.113.7"


class LossyProxy:
    """Proxy in front of `upstream` that loses the first answer to every distinct POST of `endpoints`."""

    def __init__(self, upstream: str, endpoints: Collection[str]) -> None:
        self.lost: list[str] = []
        """Endpoints of the answers lost so far."""
        self.encodings: set[tuple[str, str | None]] = set()
        """Endpoints called, each with the `Content-Encoding` of its body."""
        self._seen: set[tuple[str, bytes]] = set()
        self._lock = threading.Lock()
        self._endpoints = endpoints
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
        return f"http://127.0.0.1:{self._server.server_port}"

    def loses(self, endpoint: str, body: bytes, encoding: str | None) -> bool:
        """Record a request. Return True if its answer must be lost.

        An endpoint may be given by its last word alone, such as `publish`.
        """
        if endpoint == "save_weights_for_sampler":
            body = RENUMBERED.sub(b"", body)
        with self._lock:
            self.encodings.add((endpoint, encoding))
            meant = {endpoint, endpoint.rpartition("/")[2]} & set(self._endpoints)
            if not meant or (endpoint, body) in self._seen:
                return False
            self._seen.add((endpoint, body))
            self.lost.append(endpoint)
            return True


def _handler(proxy: LossyProxy, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._pass_on(body)

        def do_GET(self) -> None:
            self._pass_on(b"")

        def _pass_on(self, body: bytes) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            headers["X-Forwarded-For"] = FAR_AWAY
            connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=300)
            try:
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
            finally:
                connection.close()
            endpoint = urlsplit(self.path).path.removeprefix("/api/v1/")
            if proxy.loses(endpoint, body, self.headers["Content-Encoding"]):
                self.close_connection = True  # accepted by the server, and not answered here
                return
            self._answer(response, content)

        def _answer(self, response: http.client.HTTPResponse, content: bytes) -> None:
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    return Handler
