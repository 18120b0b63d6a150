"""What every tenant's request passes before its route: the key first, then the body.

In this order, because an unknown caller must not make us read, decompress or parse anything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from typing_extensions import override

from cotrain.types import TryAgainResponse
from cotrain_server.errors import RequestError
from cotrain_server.http.auth import authenticate
from cotrain_server.http.request_body import is_json, read_body
from cotrain_store.errors import StoreError, StoreUnavailable
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from fastapi import Response
    from starlette.types import Scope

    from cotrain_server.services import Services
    from cotrain_server.settings import ServerSettings
    from cotrain_store.messages.sessions import Tenant

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]

SMALL_BODY_BYTES = 1024**2
#: A number of JSON takes two bytes, and forty once it is a Python object.
JSON_BODY_BYTES = 32 * 1024**2
#: A batch poll may acknowledge this much: 100,000 ids. Refused, it would end sampling on its client.
POLL_BODY_BYTES = 8 * 1024**2
POLLS = ("/api/v1/retrieve_future", "/api/v1/retrieve_futures")
#: A poll that cannot be served is held this long: its client asks again the moment it is answered.
HOLD_S = 1.0


class CheckedRequest(Request):
    """A request whose body was measured, decompressed and depth-checked before its route runs."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._checked_body = body

    @override
    async def body(self) -> bytes:
        """Give the checked body."""
        return self._checked_body


class TenantRoute(APIRoute):
    """A route that knows its tenant (`request.state.tenant`) before it reads the body.

    The body is small: what such routes store goes into Redis.
    """

    @override
    def get_route_handler(self) -> Handler:
        """Put the gate before the route."""
        handle = super().get_route_handler()

        async def pass_gate(request: Request) -> Response:
            services: Services = request.app.state.services
            request.state.tenant = tenant = await _tenant(request, services)
            with services.body_memory.of(tenant.id) as take:
                body = await read_body(request, self.body_limit(request, services.settings), take)
                return await handle(CheckedRequest(request, body))

        return pass_gate

    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Say how many bytes a body may have."""
        return min(SMALL_BODY_BYTES, settings.max_body_bytes)


class DataRoute(TenantRoute):
    """A route whose body holds tokens, maybe very many."""

    @override
    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Say how many bytes a body may have."""
        limit = settings.max_body_bytes
        return min(JSON_BODY_BYTES, limit) if is_json(request) else limit


class PollRoute(TenantRoute):
    """A route that is polled: it never answers 5xx, which SDKs repeat at once and without end."""

    @override
    def get_route_handler(self) -> Handler:
        """Turn a store that is away into "not yet"."""
        handle = super().get_route_handler()

        async def hold(request: Request) -> Response:
            try:
                return await handle(request)
            except (StoreUnavailable, *CONNECTION_LOST):
                await asyncio.sleep(HOLD_S)
                return not_served()

        return hold

    @override
    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Say how many bytes a body may have."""
        return min(POLL_BODY_BYTES, settings.max_body_bytes)


async def meet(scope: Scope) -> None:
    """Look up the key of a poll before the layers of its route are entered.

    Thousands come at once after a restart, and under those layers each weighs twice as much while it
    waits for Redis.
    """
    if scope["path"] not in POLLS:
        return
    request, state = Request(scope), scope["state"]
    try:
        state["tenant"] = await authenticate(request, request.app.state.services)
    except (RequestError, StoreError, *CONNECTION_LOST) as error:
        state["stranger"] = error  # the route's to answer


async def _tenant(request: Request, services: Services) -> Tenant:
    met: Tenant | None = getattr(request.state, "tenant", None)
    stranger: Exception | None = getattr(request.state, "stranger", None)
    if stranger:
        raise stranger
    return met or await authenticate(request, services)


def not_served() -> JSONResponse:
    """Answer a poll while the store is away."""
    return try_again("", "paused_capacity", "the server's store is restarting")


def try_again(request_id: str, queue_state: str, reason: str | None) -> JSONResponse:
    """Answer a poll whose result is not there yet: 408, which SDKs repeat silently."""
    body = TryAgainResponse.model_validate(
        {"request_id": request_id, "queue_state": queue_state, "queue_state_reason": reason}
    )
    return JSONResponse(body.model_dump(), status_code=408)
