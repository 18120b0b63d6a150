"""One HTTP call: the key, the time limits, the encoding of what is sent.

Everything a client POSTs may be sent twice: the server knows a repeated request by its `seq_id` in
its run, and a session opened twice gets no heartbeats and ends. What is tried again, and for how
long, is for `retries.py`.

The connections to one server, in several small pools.

A pool of httpx looks at each of its connections whenever a request comes or ends, which for a hundred
requests in flight costs more than all else this client does. Small pools keep that from growing.

The caller's span, where its program traces with OpenTelemetry: a server that traces puts its own below it.

Nothing is imported for this: a program that traces has imported it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import httpx
from google.protobuf.message import Message
from pydantic import BaseModel

from cotrain.errors import APIError, APIStatusError, ForeignAnswer, RateLimitError
from cotrain.transport.download import Download, size_of
from cotrain.transport.environment import proxy_of, through_proxy, trusted
from cotrain.transport.responses import (
    acknowledged,
    is_page,
    read,
    reader,
    refusal,
    understood,
    unreached,
)
from cotrain.transport.retries import Contact, Patience, RetryPolicy, is_transient
from cotrain.version import __version__
from cotrain.wire.pass_codec import PROTOBUF

AT_ONCE = 4
"""Requests in flight in one pool, and so its connections, before the next pool is used."""
POOLS = 250
"""More than AT_ONCE times so many requests share the pools evenly."""


@dataclass
class _Pool:
    http: httpx.AsyncClient
    in_flight: int = 0


class ConnectionPools:
    """Sends each request through the first pool that is not full. Lives on the client's own loop."""

    def __init__(self, make_pool: Callable[[], httpx.AsyncClient]) -> None:
        self._make_pool = make_pool
        self._pools = [_Pool(make_pool())]

    @property
    def first(self) -> httpx.AsyncClient:
        """The pool that is always there, to build requests with."""
        return self._pools[0].http

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its answer. Raises what httpx raises."""
        pool = self._free_pool()
        pool.in_flight += 1
        try:
            return await pool.http.send(request)
        finally:
            pool.in_flight -= 1

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.http.aclose()

    def _free_pool(self) -> _Pool:
        for pool in self._pools:
            if pool.in_flight < AT_ONCE:
                return pool
        if len(self._pools) == POOLS:
            return min(self._pools, key=lambda pool: pool.in_flight)
        self._pools.append(_Pool(self._make_pool()))
        return self._pools[-1]


def traceparent() -> dict[str, str]:
    """Give the header that names the caller's span; nothing where there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    flags = int(context.trace_flags)
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}


__all__ = ["JSON", "RetryPolicy", "Transport", "acknowledged", "is_transient", "read", "reader"]

T = TypeVar("T")

JSON = "application/json"
BINARY = "application/octet-stream"
TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
# Before it answers, a server unpacks what it was sent, maybe after what others have sent.
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None, read=600.0)
# How many there are is for `http.py`. A server lets an idle one live for longer.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)
ZSTD = "zstd"
COMPRESSED_BYTES = 1_000
"""What is smaller is one packet on the network in any case."""
ENCODE_ELSEWHERE_BYTES = 256_000
"""Larger messages are written in a thread, for milliseconds in which others' answers would wait."""


@cache
def can_compress() -> bool:
    """Say whether `zstandard` is installed: the `zstd` extra of this package."""
    return find_spec("zstandard") is not None


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
        """Whether passes are compressed, which the server says and this machine must be able to."""
        self._contact = Contact(base_url)
        proxy = None if network else proxy_of(base_url)
        self._pools = ConnectionPools(
            lambda: httpx.AsyncClient(
                base_url=f"{base_url.rstrip('/')}/api/v1/",
                headers={"X-API-Key": api_key, "User-Agent": f"cotrain/{__version__}"},
                timeout=TIMEOUT,
                limits=LIMITS,
                transport=network,
                verify=trusted(),
                proxy=proxy,
                trust_env=False,
            )
        )
        self._http = self._pools.first

    @property
    def is_known(self) -> bool:
        """Whether the server has ever answered."""
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
        """POST until there is an answer that `reads` takes, and give what it makes of it.

        Raises APIError for a refusal or when it gives up. With `raises_busy`, RateLimitError is a refusal too: the caller knows better when to ask again.
        """
        body, described = await self._encoded(message)
        return await self._until_answered(
            lambda: self._post(path, body, reads, {**(headers or {}), **described, "Accept": JSON}),
            raises_busy=raises_busy,
        )

    async def put(self, path: str, message: BaseModel, reads: Callable[[httpx.Response], T]) -> T:
        """PUT until there is an answer; a field that is None is sent as null, which says "none".

        Raises APIError for a refusal or when it gives up.
        """
        body, headers = message.model_dump_json().encode(), {"Content-Type": JSON}
        return await self._until_answered(
            lambda: self._send(
                self._http.build_request("PUT", path, content=body, headers=headers), reads
            )
        )

    async def patch(self, path: str, message: BaseModel, reads: Callable[[httpx.Response], T]) -> T:
        """PATCH until there is an answer; a field that is None is not sent, which says "as it is".

        Raises APIError for a refusal or when it gives up.
        """
        body = message.model_dump_json(exclude_none=True).encode()
        headers = {"Content-Type": JSON}
        return await self._until_answered(
            lambda: self._send(
                self._http.build_request("PATCH", path, content=body, headers=headers), reads
            )
        )

    async def get(self, path: str, reads: Callable[[httpx.Response], T]) -> T:
        """GET until there is an answer. Raises APIError for a refusal or when it gives up."""
        return await self._until_answered(
            lambda: self._send(self._http.build_request("GET", path), reads)
        )

    async def delete(self, path: str) -> None:
        """DELETE until there is an answer. Raises APIError for a refusal or when it gives up."""
        await self._until_answered(
            lambda: self._send(self._http.build_request("DELETE", path), acknowledged)
        )

    async def post_stream(
        self,
        path: str,
        query: BaseModel,
        size: int,
        content: Callable[[], AsyncIterator[bytes]],
        reads: Callable[[httpx.Response], T],
    ) -> T:
        """POST a body of `size` bytes that is read while it is sent; `content` is asked each time.

        Raises APIError for a refusal or when it gives up.
        """
        return await self._until_answered(
            lambda: self._send(
                self._http.build_request(
                    "POST",
                    path,
                    params=query.model_dump(exclude_none=True),
                    content=content(),
                    headers={"Content-Length": str(size), "Content-Type": BINARY},
                    timeout=STREAM_TIMEOUT,
                ),
                reads,
            )
        )

    async def fetch(
        self, url: str, target: Path, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Download a link of the server's to a file, which is whole or not there.

        Goes on where an earlier attempt broke off, in this process or before. The link is all it
        needs: the key stays here. Raises OSError or APIError.
        """
        download = Download(self._http, url, target, progress)
        patience = self.patience()
        while True:
            try:
                await download.go_on()
            except APIError as error:
                if download.has_advanced():
                    patience.renew()
                await patience.wait_out(error)
            else:
                return

    async def size_of(self, url: str) -> int:
        """Ask how many bytes a link holds; 0 where it does not say, or does not answer."""
        with suppress(httpx.TransportError):  # which the download will say better
            return await size_of(self._http, url)
        return 0

    async def post_once(
        self,
        path: str,
        message: BaseModel | Message,
        reads: Callable[[httpx.Response], T],
        *,
        accept: str = JSON,
    ) -> T:
        """POST a single time. Raises APIError for anything but an answer that `reads` takes."""
        body, described = await self._encoded(message)
        return await self._post(path, body, reads, {**described, "Accept": accept})

    def patience(self) -> Patience:
        """Give what one call has of it."""
        return Patience(self.policy, self._contact, self.sleep)

    async def pause(self, failures: int, error: APIStatusError, waited_s: float) -> None:
        """Wait as long as the policy says after `failures` in a row, and `waited_s` already."""
        self._contact.busy(error, waited_s)
        await self.sleep(self.policy.delay_s(failures, error, random.random()))  # noqa: S311  # no secret

    async def close(self) -> None:
        """Close every connection."""
        await self._pools.close()

    async def _until_answered(
        self, call: Callable[[], Awaitable[T]], *, raises_busy: bool = False
    ) -> T:
        patience = self.patience()
        while True:
            try:
                return await call()
            except APIError as error:
                if raises_busy and isinstance(error, RateLimitError):
                    raise
                await patience.wait_out(error)

    async def _encoded(self, message: BaseModel | Message) -> tuple[bytes, dict[str, str]]:
        """Write a message; returns it with the headers that describe it."""
        if isinstance(message, BaseModel):
            return message.model_dump_json(exclude_none=True).encode(), {"Content-Type": JSON}
        size = message.ByteSize()
        zips = self.compresses and size >= COMPRESSED_BYTES
        headers = {"Content-Type": PROTOBUF, **({"Content-Encoding": ZSTD} if zips else {})}
        if size < ENCODE_ELSEWHERE_BYTES:
            return _written(message, zips=zips), headers
        return await asyncio.to_thread(_written, message, zips=zips), headers

    async def _post(
        self,
        path: str,
        body: bytes,
        reads: Callable[[httpx.Response], T],
        headers: Mapping[str, str],
    ) -> T:
        return await self._send(
            self._http.build_request("POST", path, content=body, headers=headers), reads
        )

    async def _send(self, request: httpx.Request, reads: Callable[[httpx.Response], T]) -> T:
        request.headers.update(traceparent())
        try:
            response = await self._pools.send(request)
        except httpx.TransportError as error:
            through = through_proxy(str(request.url))
            raise unreached(error, request.url, through, is_known=self.is_known) from error
        except httpx.DecodingError as error:
            raise ForeignAnswer(f"{request.url} sent what cannot be unpacked: {error}") from error
        if response.is_error:
            refused = refusal(response, is_known=self.is_known)
            if not is_page(response):
                self._contact.answered()
            raise refused
        answer = understood(response, reads, is_known=self.is_known)
        self._contact.answered()
        return answer


def _written(message: Message, *, zips: bool) -> bytes:
    body = message.SerializeToString(deterministic=True)
    return _compressed(body) if zips else body


def _compressed(body: bytes) -> bytes:
    """Make one zstd frame. A pass shrinks to a sixth or so: ids are small, and most weights one."""
    import zstandard  # an optional dependency, and slow to import

    return zstandard.ZstdCompressor().compress(body)
