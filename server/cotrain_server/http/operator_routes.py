"""What a request of the operator passes before its route: the admin key first, then a small body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute
from typing_extensions import override

from cotrain_server.http.auth import check_operator
from cotrain_server.http.json_size import FEW
from cotrain_server.http.request_body import BodyReader
from cotrain_server.http.tenant_routes import CheckedRequest
from cotrain_store.messages.ids import TenantId

if TYPE_CHECKING:
    from fastapi import Request, Response

    from cotrain_server.http.tenant_routes import Handler
    from cotrain_server.services import Services

BODY_BYTES = 64 * 1024
#: As whose its bodies are counted; no tenant has this id.
_OPERATOR = TenantId("operator")


class OperatorRoute(APIRoute):
    """A route that answers the admin key alone; to every other one it does not exist."""

    @override
    def get_route_handler(self) -> Handler:
        """Look at the key, then read the body, then run the route."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            services: Services = request.app.state.services
            check_operator(request, services)
            with services.body_memory.of(_OPERATOR) as take:
                body = await BodyReader(services.parser, _OPERATOR, BODY_BYTES, FEW, take).read(
                    request
                )
                return await handle(CheckedRequest(request, body))

        return guarded
