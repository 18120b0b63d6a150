"""One HTTP call: the key, the time limits, what is tried again and what is not.

Everything a client POSTs may be sent twice: the server knows a repeated request by its place in
its run's order, and a session opened twice is one that nobody keeps alive. So a lost answer, a busy
server (429), a restarting one (5xx) and a slow one (408) are tried again; every other refusal is the
caller's to read.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cotrain.codec import PROTOBUF
from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    MalformedMessage,
    RateLimitError,
    status_error,
)
from cotrain.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from google.protobuf.message import Message

Model = TypeVar("Model", bound=BaseModel)

JSON = "application/json"
BINARY = "application/octet-stream"
TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
# Before it answers, a server unpacks what it was sent, maybe after what others have sent.
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None, read=600.0)
PIECE_BYTES = 1024**2
# Every future that is waited for holds one connection.
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)


@dataclass(frozen=True)
class RetryPolicy:
    """How long, and how fast, a call is tried again."""

    give_up_after_s: float = 300.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0

    def delay_s(self, failures: int, error: APIError, jitter: float) -> float:
        """Seconds to wait after `failures` in a row; the server's `Retry-After` wins.

        `jitter` in 0…1 shortens the wait by up to a quarter, so that many clients spread out.
        """
        if isinstance(error, APIStatusError) and error.retry_after_s is not None:
            return error.retry_after_s
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.longest_delay_s) * (1.0 - 0.25 * jitter)


def is_transient(error: APIError) -> bool:
    """Whether the same request may well succeed in a while."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


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
        self._http = httpx.AsyncClient(
            base_url=f"{base_url.rstrip('/')}/api/v1/",
            headers={"X-API-Key": api_key, "User-Agent": f"cotrain/{__version__}"},
            timeout=TIMEOUT,
            limits=LIMITS,
            transport=network,
        )

    async def post(
        self,
        path: str,
        message: BaseModel | Message,
        headers: Mapping[str, str] | None = None,
        *,
        raises_busy: bool = False,
    ) -> httpx.Response:
        """POST until there is an answer. Raises APIError for a refusal or when it gives up.

        With `raises_busy`, RateLimitError is a refusal too: the caller knows better when to ask again.
        """
        return await self._until_answered(
            lambda: self.post_once(path, message, headers=headers), raises_busy=raises_busy
        )

    async def put(self, path: str, message: BaseModel) -> httpx.Response:
        """PUT until there is an answer; a field that is None is sent as null, which says "none".

        Raises APIError for a refusal or when it gives up.
        """
        body, headers = message.model_dump_json().encode(), {"Content-Type": JSON}
        return await self._until_answered(
            lambda: self._send(self._http.build_request("PUT", path, content=body, headers=headers))
        )

    async def get(self, path: str) -> httpx.Response:
        """GET until there is an answer. Raises APIError for a refusal or when it gives up."""
        return await self._until_answered(lambda: self._send(self._http.build_request("GET", path)))

    async def delete(self, path: str) -> httpx.Response:
        """DELETE until there is an answer. Raises APIError for a refusal or when it gives up."""
        return await self._until_answered(
            lambda: self._send(self._http.build_request("DELETE", path))
        )

    async def post_stream(
        self,
        path: str,
        query: BaseModel,
        size: int,
        content: Callable[[], AsyncIterator[bytes]],
    ) -> httpx.Response:
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
                )
            )
        )

    async def fetch(
        self, url: str, target: Path, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Download a link of the server's to a file, which is whole or not there.

        The link is all it needs: the key stays here. Raises OSError or APIError.
        """
        request = self._http.build_request("GET", url, timeout=STREAM_TIMEOUT)
        del request.headers["X-API-Key"]
        unfinished = target.with_name(f".{target.name}.part")
        try:
            async with aclosing(await self._http.send(request, stream=True)) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                await _save(response, unfinished, progress)
            await asyncio.to_thread(unfinished.replace, target)
        except httpx.TransportError as error:
            raise APIConnectionError(f"{target.name} could not be downloaded: {error}") from error
        finally:
            await asyncio.to_thread(unfinished.unlink, missing_ok=True)

    async def post_once(
        self,
        path: str,
        message: BaseModel | Message,
        *,
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """POST a single time. Raises APIError for anything but success."""
        body, media_type = _encode(message)
        headers = {**(headers or {}), "Content-Type": media_type, "Accept": accept}
        return await self._send(
            self._http.build_request("POST", path, content=body, headers=headers)
        )

    async def pause(self, failures: int, error: APIError) -> None:
        """Wait as long as the policy says after `failures` in a row."""
        await self.sleep(self.policy.delay_s(failures, error, random.random()))  # noqa: S311

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _until_answered(
        self, call: Callable[[], Awaitable[httpx.Response]], *, raises_busy: bool = False
    ) -> httpx.Response:
        failures, deadline = 0, time.monotonic() + self.policy.give_up_after_s
        while True:
            try:
                return await call()
            except APIError as error:
                failures += 1
                is_final = raises_busy and isinstance(error, RateLimitError)
                if is_final or not is_transient(error) or time.monotonic() > deadline:
                    raise
                await self.pause(failures, error)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._http.send(request)
        except httpx.TimeoutException as error:
            raise APITimeoutError(f"{request.url} did not answer in time") from error
        except httpx.TransportError as error:
            raise APIConnectionError(f"cannot reach {request.url}: {error}") from error
        if response.is_error:
            raise _refusal(response)
        return response


async def _save(
    response: httpx.Response, file: Path, progress: Callable[[int, int], None] | None
) -> None:
    total, received = int(response.headers.get("Content-Length", 0)), 0
    with await asyncio.to_thread(file.open, "wb") as opened:
        async for piece in response.aiter_bytes(PIECE_BYTES):
            await asyncio.to_thread(opened.write, piece)
            received += len(piece)
            if progress:
                progress(received, total)


def read(response: httpx.Response, model: type[Model]) -> Model:
    """Read a JSON answer. Raises MalformedMessage where it is not of this shape."""
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise MalformedMessage(f"{response.url} did not answer a {model.__name__}") from error


def _encode(message: BaseModel | Message) -> tuple[bytes, str]:
    if isinstance(message, BaseModel):
        return message.model_dump_json(exclude_none=True).encode(), JSON
    return message.SerializeToString(deterministic=True), PROTOBUF


def _refusal(response: httpx.Response) -> APIStatusError:
    body = _json_or_text(response)
    detail = body.get("detail", body) if isinstance(body, dict) else body
    return status_error(
        response.status_code,
        str(detail or response.reason_phrase),
        body,
        _seconds(response.headers.get("Retry-After")),
    )


def _json_or_text(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None  # absent, or an HTTP date, which this server does not send
    return seconds if 0 < seconds <= 60 else None
