"""Proxies between a client and a server that lose answers or replace them."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Collection, Mapping
from email.message import Message
from typing import NamedTuple
from urllib.parse import urlsplit

from typing_extensions import override

from tests.support.local_server import NO_HEADERS, Handler, LocalServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
# SDK 0.38 gives the sampler of a save a new number each time it sends the same save.
RENUMBERED = re.compile(rb'"sampling_session_seq_id":\s*\d+')
# An address reserved for documentation, so that the server sees a remote client.
FAR_AWAY = "203.0.113.7"
PAGE = {"Content-Type": "text/html"}


class Request(NamedTuple):
    """Request of a client."""

    method: str
    path: str
    headers: Message
    body: bytes

    @property
    def endpoint(self) -> str:
        """Path below the version of the API, without the query."""
        return urlsplit(self.path).path.removeprefix("/api/v1/")


class Answer(NamedTuple):
    """Answer of the server, or of the proxy in its place."""

    status: int = 200
    content: bytes = b""
    headers: Mapping[str, str] = NO_HEADERS
    is_passed_on: bool = False
    """True if the server receives the request although the proxy answers."""


class Proxy(LocalServer):
    """Proxy in front of `upstream`."""

    def __init__(self, upstream: str) -> None:
        proxy = self
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()

        class Passing(Handler):
            @override
            def respond(self) -> None:
                answer = proxy.answer_to(Request(self.command, self.path, self.headers, self.body()))
                if answer is None:
                    self.close_connection = True
                else:
                    self.answer(answer.status, answer.content, answer.headers)

        super().__init__(Passing)

    def answer_to(self, request: Request) -> Answer | None:
        """Return the answer to a request, or None to close the connection without one."""
        raise NotImplementedError

    def pass_on(self, request: Request, **more: str) -> Answer:
        """Return the server's answer to a request, sent with `more` headers."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP} | more
        connection = http.client.HTTPConnection(self._upstream, timeout=300)
        try:
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            kept = {k: v for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP}
            return Answer(response.status, response.read(), kept)
        finally:
            connection.close()


class LossyProxy(Proxy):
    """Proxy of a remote client that loses the first answer to every distinct POST of `endpoints`."""

    def __init__(self, upstream: str, endpoints: Collection[str]) -> None:
        super().__init__(upstream)
        self.lost: list[str] = []
        """Endpoints of the answers lost so far."""
        self.encodings: set[tuple[str, str | None]] = set()
        """Endpoints called, each with the `Content-Encoding` of its body."""
        self._seen: set[tuple[str, bytes]] = set()
        self._endpoints = endpoints

    @override
    def answer_to(self, request: Request) -> Answer | None:
        answer = self.pass_on(request, **{"X-Forwarded-For": FAR_AWAY})
        return None if self._loses(request) else answer

    def _loses(self, request: Request) -> bool:
        """Record a request. Return True if its answer must be lost.

        An endpoint may be given by its last word alone, such as `publish`.
        """
        endpoint, body = request.endpoint, request.body
        if endpoint == "save_weights_for_sampler":
            body = RENUMBERED.sub(b"", body)
        with self._lock:
            self.encodings.add((endpoint, request.headers.get("Content-Encoding")))
            meant = {endpoint, endpoint.rpartition("/")[2]} & set(self._endpoints)
            if not meant or (endpoint, body) in self._seen:
                return False
            self._seen.add((endpoint, body))
            self.lost.append(endpoint)
            return True


class SwappingProxy(Proxy):
    """Proxy that answers some requests itself, such as a login page or a maintenance notice in front of a server."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.swaps: dict[str, list[Answer]] = {}
        """Endpoint → answers to its next requests, used in order."""

    @override
    def answer_to(self, request: Request) -> Answer:
        with self._lock:
            waiting = self.swaps.get(request.endpoint)
            swap = waiting.pop(0) if waiting else None
        if swap is None:
            return self.pass_on(request)
        if swap.is_passed_on:
            self.pass_on(request)
        return swap


FOREIGN = {
    "login": Answer(content=b"<html>log in</html>", headers=PAGE),
    "login after the server": Answer(content=b"<html>", headers=PAGE, is_passed_on=True),
    "redirect": Answer(302, headers={"Location": "https://sso.example/login"}),
    "loop": Answer(307, headers={"Location": "/api/v1/forward_backward"}),
    "maintenance": Answer(content=b'{"status": "maintenance"}'),
    "empty": Answer(),
    "cut": Answer(content=b'{"request_id": "a', is_passed_on=True),
    "text": Answer(content=b"back soon", headers={"Content-Type": "text/plain"}),
    "list": Answer(content=b"[]"),
}
