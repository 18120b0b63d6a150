"""What every tenant's request passes before its route: the key first, then the body.

In this order, because an unknown caller must not make us read, decompress or parse anything.

What a request of the operator passes before its route: the admin key first, then a small body.

Describe in the OpenAPI bodies that routes parse without the framework.

What routes ask for by type: the services, the tenant, and which part of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Query, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader
from pydantic import BaseModel
from typing_extensions import override

from cotrain.wire.pass_codec import PROTOBUF
from cotrain.wire.rest import MAX_PAGE, AccessScope
from cotrain_server.http.auth import authenticate, check_operator
from cotrain_server.http.request_body import FEW, MANY, BodyReader, JsonLimits, is_json
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import Tenant

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


def body_of(*models: type[BaseModel], binary: bool = False) -> dict[str, Any]:
    """Describe a JSON body of one of these models, or with `binary` its message of the same name."""
    schemas = [_whole(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if binary:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


def _whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Put what a schema refers to in its place: within the OpenAPI its references lead nowhere."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items() if key != "discriminator"}

    whole: dict[str, Any] = resolve(schema)
    return whole


#: For the OpenAPI page; the check itself is made before the route.
api_key = Security(APIKeyHeader(name="X-API-Key", auto_error=False))


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _tenant(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


ServicesDep = Annotated[Services, Depends(_services)]
TenantDep = Annotated[Tenant, Depends(_tenant)]

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Scope = Annotated[AccessScope, Query()]
