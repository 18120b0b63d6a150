"""Route classes of tenants and of the operator, and the annotated types of their parameters.

Both classes check the key before they read the body. An unauthenticated client therefore cannot
make the server read, decompress or parse anything.

Some routes parse their bodies without FastAPI. `body_of` documents such a body in the OpenAPI page.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader
from pydantic import BaseModel
from starlette.types import Receive, Send
from starlette.types import Scope as RequestScope
from typing_extensions import override

from cotrain.wire.codec import PROTOBUF
from cotrain.wire.rest import MAX_PAGE, AccessScope
from cotrain_server.http.auth import READS, authenticate, check_operator
from cotrain_server.http.request_body import FEW, MANY, BodyReader, CheckedRequest, JsonLimits, is_json
from cotrain_server.http.responses import refusal
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.errors import Refused, StoreError, StoreUnavailable
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import Tenant
from cotrain_store.redis_client.connection import CONNECTION_LOST

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Answer = TypeVar("Answer")
#: Function of a request whose body was checked, the services, and the tenant.
Endpoint = Callable[[Request, Services, Tenant], Coroutine[Any, Any, Answer]]

#: Size limit of a body with settings, of one with tokens as JSON, and of one from the operator.
SMALL_BODY_BYTES = 1024**2
JSON_BODY_BYTES = 32 * 1024**2
OPERATOR_BODY_BYTES = 64 * 1024
#: Time limit of a request of the operator that only reads.
READ_TIMEOUT_S = 5.0
#: Pseudo-tenant to which operator request bodies are charged. No tenant has this id.
_OPERATOR = TenantId("operator")
#: For the OpenAPI page only. The route classes check the key.
api_key = Security(APIKeyHeader(name="X-API-Key", auto_error=False))


class TenantRoute(APIRoute):
    """A route with a tenant's key and a small body. It sets `request.state.tenant`.

    The body is small, because such routes store it in Redis and parse it in the event loop.
    """

    json_limits: ClassVar[JsonLimits] = FEW

    @override
    def get_route_handler(self) -> Handler:
        """Return a handler that authenticates, reads the body, and runs the route."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            return await self._guarded(request, lambda checked, _, __: handle(checked))

        return guarded

    async def serve(self, scope: RequestScope, receive: Receive, send: Send) -> None:
        """Send the answer of an endpoint that queues its request, without FastAPI (`DirectRoutes`)."""
        request = Request(scope, receive)
        try:
            queued: BaseModel = await self._guarded(request, self.endpoint)
            answer = Response(queued.model_dump_json(exclude_none=True), media_type="application/json")
        except CONNECTION_LOST:
            answer = refusal(StoreUnavailable(), request.state.request_id)
        except StoreError as error:
            answer = refusal(error, request.state.request_id)
        await answer(scope, receive, send)

    async def _guarded(self, request: Request, endpoint: Endpoint[Answer]) -> Answer:
        services: Services = request.app.state.services
        tenant = await authenticate(request, services)
        with (
            services.tenant_requests.of(tenant.id, 1),  # counts towards its limit
            services.body_memory.of(tenant.id) as take,  # released when the route has answered
        ):
            limit_bytes = self.body_limit(request, services.settings)
            reader = BodyReader(services.parser, tenant.id, limit_bytes, self.json_limits, take)
            try:
                checked = CheckedRequest(request, await reader.read(request))
                return await endpoint(checked, services, tenant)
            except Refused as refused:
                services.refusals.record(tenant.id, refused)
                raise

    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Return the maximum size of a body in bytes."""
        return min(SMALL_BODY_BYTES, settings.max_body_bytes)


class DataRoute(TenantRoute):
    """A route whose body contains tokens, possibly millions. `services.parser` parses it."""

    json_limits: ClassVar[JsonLimits] = MANY

    @override
    def body_limit(self, request: Request, settings: ServerSettings) -> int:
        """Return the maximum size of a body in bytes."""
        limit = settings.max_body_bytes
        return min(JSON_BODY_BYTES, limit) if is_json(request) else limit


class OperatorRoute(APIRoute):
    """A route for the admin key only. Any other key gets a 404. The body is small."""

    @override
    def get_route_handler(self) -> Handler:
        """Return a handler that checks the key, reads the body, and runs the route."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            services: Services = request.app.state.services
            check_operator(request, services)
            with services.body_memory.of(_OPERATOR) as take:
                body = await BodyReader(services.parser, _OPERATOR, OPERATOR_BODY_BYTES, FEW, take).read(request)
                return await _in_time(request, handle(CheckedRequest(request, body)))

        return guarded


async def _in_time(request: Request, answer: Awaitable[Response]) -> Response:
    """Return an answer. Raises StoreUnavailable if the answer only reads, and Redis takes too long."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S if request.method in READS else None):
            return await answer
    except TimeoutError:
        raise StoreUnavailable from None


def server_url(request: Request, settings: ServerSettings) -> str:
    """Return the address of this server for its clients, without a trailing slash."""
    return (settings.public_url or str(request.base_url)).rstrip("/")


def tenant_router(tag: str, prefix: str = "/api/v1", kind: type[APIRoute] = TenantRoute) -> APIRouter:
    """Return a router of requests with a tenant's API key. `tag` is its heading in the OpenAPI page."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=kind, dependencies=[api_key])


def operator_router(prefix: str) -> APIRouter:
    """Return a router of requests with an operator's key."""
    return tenant_router("admin", prefix, OperatorRoute)


def body_of(*models: type[BaseModel], binary: bool = False) -> dict[str, Any]:
    """Return the OpenAPI schema of a JSON body of one of these models; with `binary`, or of a protobuf message."""
    schemas = [_inlined(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema}} if models else {}
    if binary:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


def queued_body(*models: type[BaseModel], binary: bool = False) -> dict[str, Any]:
    """Return the options of a route that queues its request, which has a body of one of these models."""
    return {"response_model_exclude_none": True, "openapi_extra": body_of(*models, binary=binary)}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Inline the definitions that a schema refers to, because its references do not resolve within
    the OpenAPI document.
    """
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items() if key != "discriminator"}

    inlined: dict[str, Any] = resolve(schema)
    return inlined


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
