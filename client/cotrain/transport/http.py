"""HTTP transport: the key, the timeouts, the encoding of requests.

Every POST may be sent twice. The server recognises a repeated request by its `seq_id` in the run. A session opened
twice gets no heartbeats and ends. The module `responses.py` decides which calls are retried, and for how long.

Connections are spread over small pools. The library httpx scans all connections of a pool whenever a request starts or
ends. With a hundred requests in flight, that costs more than everything else in this client.

If the caller's program traces with OpenTelemetry, requests carry the caller's span, and a tracing server makes its
spans children of it. OpenTelemetry is never imported here: a tracing program has imported it.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import httpx
from google.protobuf.message import Message
from pydantic import BaseModel
from typing_extensions import override

from cotrain.errors import APIError, APIStatusError, ForeignAnswer, RateLimitError
from cotrain.settings import proxy_of, through_proxy, trusted
from cotrain.transport.download import Download, size_of
from cotrain.transport.responses import (
    Contact,
    Patience,
    RetryPolicy,
    acknowledged,
    connection_error,
    is_page,
    parsed,
    refusal,
)
from cotrain.version import __version__
from cotrain.wire.codec import PROTOBUF

T = TypeVar("T")

AT_ONCE = 4
"""Maximum number of requests in flight in one pool, and so of its connections, before the next pool is used."""
POOLS = 250
"""Maximum number of pools. More than AT_ONCE times this many requests share the pools evenly."""
JSON = "application/json"
BINARY = "application/octet-stream"
TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
# A server unpacks the whole body before it responds, possibly after the bodies of other clients.
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None, read=600.0)
# `ConnectionPools` limits the number of connections. The server keeps idle ones open for longer than this.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)

ZSTD = "zstd"
COMPRESSED_BYTES = 1_000
"""Smaller messages are not compressed: they fit into one packet in any case."""
ENCODE_IN_THREAD_BYTES = 256_000
"""Larger messages are encoded in a thread: that takes milliseconds, which would delay other responses."""


class Transport:
    """Calls of one server with one key."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        network: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.policy = policy or RetryPolicy()
        self.sleep = sleep
        self.compresses = False
        """True if passes are compressed, as the server requests of a client on another host."""
        self._contact = Contact(base_url)
        if network is None:
            proxy = proxy_of(base_url)
            network = ConnectionPools(lambda: httpx.AsyncHTTPTransport(verify=trusted(), limits=LIMITS, proxy=proxy))
        self._http = httpx.AsyncClient(
            base_url=f"{base_url.rstrip('/')}/api/v1/",
            headers={"X-API-Key": api_key, "User-Agent": f"cotrain/{__version__}"},
            timeout=TIMEOUT,
            transport=network,
            trust_env=False,
        )

    @property
    def is_known(self) -> bool:
        """True if the server has ever responded."""
        return self._contact.is_known

    async def post(
        self,
        path: str,
        message: BaseModel | Message,
        reads: Callable[[httpx.Response], T],
        headers: Mapping[str, str] | None = None,
        *,
        raises_busy: bool = False,
    ) -> T:
        """POST until a response can be parsed by `reads`, and return the parsed value.

        Raises APIError if the server rejects the request or the retries end. With `raises_busy`,
        RateLimitError is raised at once, for callers that schedule their own retries.
        """
        body, content_headers = await self._encoded(message)
        all_headers = {**(headers or {}), **content_headers, "Accept": JSON}
        send = partial(self._post, path, body, reads, all_headers)
        return await self._until_answered(send, self.patience(), raises_busy=raises_busy)

    async def put(self, path: str, message: BaseModel, reads: Callable[[httpx.Response], T]) -> T:
        """PUT until there is a response. A field that is None is sent as null, which clears it.

        Raises APIError if the server rejects the request or the retries end.
        """
        return await self._request("PUT", path, reads, message.model_dump_json())

    async def patch(self, path: str, message: BaseModel, reads: Callable[[httpx.Response], T]) -> T:
        """PATCH until there is a response. A field that is None is not sent and stays unchanged.

        Raises APIError if the server rejects the request or the retries end.
        """
        return await self._request("PATCH", path, reads, message.model_dump_json(exclude_none=True))

    async def get(self, path: str, reads: Callable[[httpx.Response], T]) -> T:
        """GET until there is a response. Raises APIError if it is a rejection or the retries end."""
        return await self._request("GET", path, reads)

    async def delete(self, path: str, reads: Callable[[httpx.Response], object] = acknowledged) -> None:
        """DELETE until there is a response. Raises APIError if it is a rejection or the retries end."""
        await self._request("DELETE", path, reads)

    async def post_stream(
        self,
        path: str,
        query: BaseModel,
        size: int,
        content: Callable[[], AsyncIterator[bytes]],
        reads: Callable[[httpx.Response], T],
    ) -> T:
        """POST a body of `size` bytes that is read while it is sent; each attempt calls `content` again.

        Raises APIError if the server rejects the request or the retries end.
        """

        def request() -> httpx.Request:
            return self._http.build_request(
                "POST",
                path,
                params=query.model_dump(exclude_none=True),
                content=content(),
                headers={"Content-Length": str(size), "Content-Type": BINARY},
                timeout=STREAM_TIMEOUT,
            )

        return await self._until_answered(lambda: self._send(request(), reads), self.patience())

    async def fetch(self, url: str, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Download a link of the server to a file, atomically.

        Resumes where an earlier attempt stopped, also one of another process. The link needs no key, so the
        key is not sent. Raises OSError or APIError.
        """
        patience = self.patience()

        def on_bytes(arrived: int, total: int) -> None:
            patience.renew()
            if progress:
                progress(arrived, total)

        download = Download(self._http, url, target, on_bytes)
        await self._until_answered(download.resume, patience)

    async def size_of(self, url: str) -> int:
        """Return the bytes behind a link; 0 if the server sends no size, or does not respond."""
        return await size_of(self._http, url)

    async def post_once(
        self, path: str, message: BaseModel | Message, reads: Callable[[httpx.Response], T], *, accept: str = JSON
    ) -> T:
        """POST a single time. Raises APIError for any response that `reads` cannot parse."""
        body, content_headers = await self._encoded(message)
        return await self._post(path, body, reads, {**content_headers, "Accept": accept})

    def patience(self) -> Patience:
        """Return the retry state of one call."""
        return Patience(self.policy, self._contact, self.sleep)

    async def pause(self, failures: int, error: APIStatusError, waited_s: float) -> None:
        """Wait for the policy's delay after `failures` in a row; `waited_s` is the total wait so far."""
        self._contact.busy(error, waited_s)
        await self.sleep(self.policy.delay_s(failures, error, random.random()))  # noqa: S311  # no secret

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _request(
        self, method: str, path: str, reads: Callable[[httpx.Response], T], body: str | None = None
    ) -> T:
        headers = {} if body is None else {"Content-Type": JSON}
        build = partial(self._http.build_request, method, path, content=body, headers=headers)
        return await self._until_answered(lambda: self._send(build(), reads), self.patience())

    async def _until_answered(
        self, call: Callable[[], Awaitable[T]], patience: Patience, *, raises_busy: bool = False
    ) -> T:
        while True:
            try:
                return await call()
            except APIError as error:
                if raises_busy and isinstance(error, RateLimitError):
                    raise
                await patience.wait_out(error)

    async def _encoded(self, message: BaseModel | Message) -> tuple[bytes, dict[str, str]]:
        """Encode a message; returns its bytes, and the headers for their type and compression."""
        if isinstance(message, BaseModel):
            return message.model_dump_json(exclude_none=True).encode(), {"Content-Type": JSON}
        size = message.ByteSize()
        compress = self.compresses and size >= COMPRESSED_BYTES
        headers = {"Content-Type": PROTOBUF, **({"Content-Encoding": ZSTD} if compress else {})}
        if size < ENCODE_IN_THREAD_BYTES:
            return _serialized(message, compress=compress), headers
        return await asyncio.to_thread(_serialized, message, compress=compress), headers

    async def _post(
        self, path: str, body: bytes, reads: Callable[[httpx.Response], T], headers: Mapping[str, str]
    ) -> T:
        return await self._send(self._http.build_request("POST", path, content=body, headers=headers), reads)

    async def _send(self, request: httpx.Request, reads: Callable[[httpx.Response], T]) -> T:
        request.headers.update(trace_headers())
        try:
            response = await self._http.send(request)
        except httpx.TransportError as error:
            through = through_proxy(str(request.url))
            raise connection_error(error, request.url, through, is_known=self.is_known) from error
        except httpx.DecodingError as error:
            raise ForeignAnswer(f"{request.url} sent what cannot be unpacked: {error}") from error
        if response.is_error:
            rejection = refusal(response, is_known=self.is_known)
            if not is_page(response):
                self._contact.answered()
            raise rejection
        answer = parsed(response, reads, is_known=self.is_known)
        self._contact.answered()
        return answer


@dataclass
class _Pool:
    network: httpx.AsyncBaseTransport
    in_flight: int = 0


class ConnectionPools(httpx.AsyncBaseTransport):
    """Pools of connections to one server; a request uses the first pool that is not full."""

    def __init__(self, make_pool: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make_pool = make_pool
        self._pools = [_Pool(make_pool())]

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._free_pool()
        pool.in_flight += 1
        try:
            return await pool.network.handle_async_request(request)
        finally:  # at the head of the response, whose body follows soon
            pool.in_flight -= 1

    @override
    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.network.aclose()

    def _free_pool(self) -> _Pool:
        for pool in self._pools:
            if pool.in_flight < AT_ONCE:
                return pool
        if len(self._pools) == POOLS:
            return min(self._pools, key=lambda pool: pool.in_flight)
        self._pools.append(_Pool(self._make_pool()))
        return self._pools[-1]


def url_of(*parts: str) -> str:
    """Return a URL path of parts that may contain any character."""
    return "/".join(quote(part, safe="") for part in parts)


def trace_headers() -> dict[str, str]:
    """Return the header `traceparent` of the caller's span, or {} without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    flags = int(context.trace_flags)
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}


def _serialized(message: Message, *, compress: bool) -> bytes:
    """Return the bytes of a message, or one zstd frame of them.

    A pass shrinks to about a sixth: ids are small, and most weights are one. A prompt that several datums repeat
    takes its bytes once, with its targets and weights.
    """
    body = message.SerializeToString(deterministic=True)
    if not compress:
        return body
    import zstandard  # slow to import

    return zstandard.ZstdCompressor().compress(body)
