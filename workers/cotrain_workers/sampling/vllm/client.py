"""Client for the HTTP API of a vLLM server: one method per route, and one exception per kind of failure."""

import socket
import ssl
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from cotrain_workers.sampling.vllm.protocol import Completion, parse_completion

# The response to a generation arrives at its end, however long it takes. Keep-alive of the connection detects
# a disconnected server within a minute. This timeout detects a hung one.
TIMEOUT = httpx.Timeout(connect=10.0, write=60.0, read=3600.0, pool=None)
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not on every system
    ),
]
_MESSAGE_CHARACTERS = 500


@cache
def trusted() -> ssl.SSLContext:
    """Return the TLS context. Its CA certificates are read from disk once in a process, not per client."""
    return httpx.create_ssl_context()


class VllmError(Exception):
    """A request to a vLLM server failed."""


class VllmUnavailable(VllmError):
    """The server does not answer or cannot serve now. The same request may succeed later."""

    def __init__(self, reason: str, *, is_reached: bool) -> None:
        """Store the reason. `is_reached`: the server had received the request, which may be the cause."""
        super().__init__(reason)
        self.is_reached = is_reached


class VllmRefused(VllmError):
    """The server rejects the request as invalid; the message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdapterUnknown(VllmError):
    """The server has no model of this name: it was restarted, or another client unloaded the adapter."""


class AdapterRefused(VllmError):
    """The server cannot load an adapter. The message may contain paths, so it is for the log, never for a tenant."""


class VllmServer:
    """Client of one vLLM server. For one event loop."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The callers limit the number of connections.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=TIMEOUT,
            transport=httpx.AsyncHTTPTransport(verify=trusted(), limits=limits, socket_options=KEEP_ALIVE),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def version(self) -> str:
        """Return the server's version. Raises VllmRefused if the server does not report one."""
        return str((await self._json("GET", "/version"))["version"])

    async def models(self) -> list[dict[str, Any]]:
        """Return a card for the base model under each of its names, and for each adapter."""
        return list((await self._json("GET", "/v1/models"))["data"])

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Generate one sequence. Cancelling this aborts it on the server.

        Raises:
            VllmUnavailable: the server is unavailable, or it aborted the sequence.
            VllmRefused: the request is invalid.
            AdapterUnknown: the model of the request is not loaded.
        """
        response = await self._send("POST", "/v1/completions", body)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterUnknown(_message(response))
        _raise_for(response)
        completion = parse_completion(response.content)
        if completion.choice["finish_reason"] not in ("stop", "length"):
            raise VllmUnavailable(f"aborted: {completion.choice['finish_reason']}", is_reached=True)
        return completion

    async def load(self, name: str, path: Path) -> None:
        """Load the PEFT folder at `path`, a path of the server's file system. Idempotent.

        Raises:
            VllmUnavailable: the adapter may be loaded or not.
            AdapterRefused: the server cannot load it, or LoRA or its run-time updating is off.
        """
        body = {"lora_name": name, "lora_path": str(path)}
        response = await self._send("POST", "/v1/load_lora_adapter", body)
        if response.is_success or any(card["id"] == name for card in await self.models()):
            return
        # Some versions respond 500 both if the engine cannot load the adapter and if the engine has crashed.
        _raise_for(await self._send("GET", "/health"))
        raise AdapterRefused(_message(response))

    async def unload(self, name: str) -> None:
        """Unload an adapter that no request uses. Idempotent."""
        response = await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if response.is_server_error:
            _raise_for(response)

    async def can_load(self) -> bool:
        """Return True if the route to load adapters exists. An empty request is then rejected, not 404 or 405."""
        body = {"lora_name": "", "lora_path": ""}
        response = await self._send("POST", "/v1/load_lora_adapter", body)
        return response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        response = await self._send(method, path)
        _raise_for(response)
        answer: dict[str, Any] = response.json()
        return answer

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as refused:
            raise VllmUnavailable(f"no connection: {refused}", is_reached=False) from refused
        except httpx.TransportError as lost:
            raise VllmUnavailable(f"connection lost: {lost!r}", is_reached=True) from lost


def _raise_for(response: httpx.Response) -> None:
    """Raise VllmUnavailable for a transient error, VllmRefused for a permanent one."""
    status = response.status_code
    if status in (408, 429) or response.is_server_error:
        # Statuses other than 500 come from a proxy in front of an unavailable or starting server.
        raise VllmUnavailable(f"answered {status}: {_message(response)}", is_reached=status == 500)
    if not response.is_success:
        raise VllmRefused(status, _message(response))


def _message(response: httpx.Response) -> str:
    """Return the server's error message: `{"error": {"message": ...}}`; in older versions without `error`."""
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:_MESSAGE_CHARACTERS]
