"""Long polls in front of the framework (`DirectRoutes`): authenticate, read, wait, send.

Thousands are open at once. Under the layers of a route (body, dependencies, routing) each took 36
KB, and twice that during the Redis lookup of its key. After a restart all of them arrive at once.

A poll never answers 5xx, because SDKs repeat that at once and without limit. An unavailable store
is answered as "not yet".
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cotrain.wire.model import WireModel
from cotrain.wire.runs import TryAgainResponse
from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.http.auth import authenticate
from cotrain_server.http.request_body import FEW, BodyReader, is_json
from cotrain_server.http.responses import refusal, schema_refusal
from cotrain_server.services import Services
from cotrain_store.errors import StoreError, StoreUnavailable
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import Tenant
from cotrain_store.monitoring.traces import current_traceparent, record, tracer
from cotrain_store.redis_client.connection import CONNECTION_LOST, RECANCEL_S

Wait = Callable[[], Coroutine[Any, Any, Response]]
Endpoint = Callable[[Any, Request, Services, Tenant], Coroutine[Any, Any, Response | Wait]]

Answer = TypeVar("Answer")
Ready = TypeVar("Ready")

#: Size limit of a batch poll: MAX_RETRIEVED ids of maximum length.
POLL_BODY_BYTES = 2 * 1024**2
#: Delay before answering a poll that cannot be served, because its client repeats it at once.
HOLD_S = 1.0


@dataclass(frozen=True)
class Poll:
    """A polled endpoint: POST `path` with the JSON of `model`."""

    path: str
    model: type[WireModel]
    endpoint: Endpoint
    """Returns the answer, or a coroutine function that waits for it. Only that function is kept,
    and it is cancelled when the client disconnects.
    """

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, at the latest after the hold time."""
        request_id = scope["state"]["request_id"]
        # The request body is freed before waiting.
        ready = await answered(_prepare(self, Request(scope, receive)), request_id)
        if not isinstance(ready, Response):
            answer = await while_connected(receive, answered(ready(), request_id))
            ready = answer or Response(status_code=CLIENT_CLOSED_REQUEST)
        await ready(scope, receive, send)


async def answered(work: Coroutine[Any, Any, Ready], request_id: str) -> Ready | Response:
    """Return the result of a poll, or the response for the error that it raised."""
    try:
        return await work
    except (StoreUnavailable, *CONNECTION_LOST):
        await asyncio.sleep(HOLD_S)
        return try_again("", "paused_capacity", "the server's store is restarting")
    except StoreError as error:
        return refusal(error, request_id)


def try_again(request_id: str, queue_state: str, reason: str | None) -> JSONResponse:
    """Return the answer of a poll without a result yet: 408, which SDKs repeat silently."""
    body = TryAgainResponse.model_validate(
        {"request_id": request_id, "queue_state": queue_state, "queue_state_reason": reason}
    )
    return JSONResponse(body.model_dump(), status_code=408)


async def _prepare(poll: Poll, request: Request) -> Response | Wait:
    # Check the key first: an unauthenticated client must not cause any read.
    services: Services = request.app.state.services
    tenant = await authenticate(request, services)
    try:
        wanted = await _read(poll, request, services, tenant.id)
    except ValidationError as error:
        return schema_refusal(error.errors(), request.state.request_id)
    return await poll.endpoint(wanted, request, services, tenant)


async def _read(poll: Poll, request: Request, services: Services, tenant: TenantId) -> WireModel:
    limit_bytes = min(POLL_BODY_BYTES, services.settings.max_body_bytes)
    with services.tenant_requests.of(tenant, 1), services.body_memory.of(tenant) as take:
        reader = BodyReader(services.parser, tenant, limit_bytes, FEW, take)
        body = await reader.read(request)
        if is_json(request):
            return poll.model.model_validate_json(body)
        return poll.model.model_validate(body)  # raises, because bytes are no model


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Await `work` while its client is connected. If the client disconnects, cancel it and return None."""
    route, is_disconnected = asyncio.current_task(), False
    assert route

    async def end_with_client() -> None:
        nonlocal is_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        while True:  # one cancellation may not suffice (`stop_tasks`)
            route.cancel()
            await asyncio.sleep(RECANCEL_S)

    watching = asyncio.create_task(end_with_client())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_disconnected:
            raise
        while route.uncancel():
            pass
        return None
    finally:
        watching.cancel()


async def trace_retrieval(
    services: Services, tenant: TenantId, request: RequestId, began: float, result: Result
) -> None:
    """Record the poll that delivered a result, as a child of its client's span, or else of the span of its op."""
    traces = tracer()
    if traces is None:
        return
    op_span = await services.futures.trace_of(tenant, request)
    parent = current_traceparent() or op_span
    if not parent:
        return
    is_failure = result.kind is ResultKind.FAILURE
    record(
        traces, "retrieve_future", began, time.time(), parent, links=[op_span] if parent != op_span else [],
        request=request, tenant=tenant, outcome="failed" if is_failure else "ok",
    )  # fmt: skip
