"""What every tenant's request passes before its route: the key first, then the body.

In this order, because an unknown caller must not make us read, decompress or parse anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.routing import APIRoute
from typing_extensions import override

from cotrain_server.http.auth import authenticate
from cotrain_server.http.json_size import FEW, MANY
from cotrain_server.http.request_body import BodyReader, is_json

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, ClassVar

    from fastapi import Response

    from cotrain_server.http.json_size import JsonLimits
    from cotrain_server.services import Services
    from cotrain_server.settings import ServerSettings

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]

SMALL_BODY_BYTES = 1024**2
JSON_BODY_BYTES = 32 * 1024**2


class CheckedRequest(Request):
    """A request whose body was decompressed and measured before its route runs."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._checked_body = body

    @override
    async def body(self) -> bytes:
        """Give the checked body."""
        return self._checked_body


class TenantRoute(APIRoute):
    """A route that knows its tenant (`request.state.tenant`) before it reads the body.

    The body is small: what such routes store goes into Redis, and the event loop itself parses it.
    """

    json_limits: ClassVar[JsonLimits] = FEW

    @override
    def get_route_handler(self) -> Handler:
        """Authenticate, then read the body, then run the route."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            services: Services = request.app.state.services
            tenant = await authenticate(request, services)
            limit_bytes = self.body_limit(request, services.settings)
            with (
                services.tenant_connections.of(tenant.id),
                services.body_memory.of(tenant.id) as take,
            ):
                reader = BodyReader(services.parser, tenant.id, limit_bytes, self.json_limits, take)
                body = await reader.read(request)
                return await handle(CheckedRequest(request, body))

        return guarded

    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Say how many bytes a body may have."""
        return min(SMALL_BODY_BYTES, settings.max_body_bytes)


class DataRoute(TenantRoute):
    """A route whose body holds tokens, maybe very many: it parses it through the `Parser`."""

    json_limits: ClassVar[JsonLimits] = MANY

    @override
    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Say how many bytes a body may have."""
        limit = settings.max_body_bytes
        return min(JSON_BODY_BYTES, limit) if is_json(request) else limit
