"""Routes that answer in another API's words: its errors, and its server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from cotrain.wire.sampling import SampleResponse
from cotrain_server import errors
from cotrain_server.errors import Invalid, RequestError, sentence
from cotrain_server.http.finite_json import FiniteJSONResponse, finite_json
from cotrain_server.http.long_poll import while_connected
from cotrain_server.http.request_body import CHATS, JsonLimits, body_weight, json_body
from cotrain_server.http.tenant_routes import DataRoute, Handler
from cotrain_server.services import Services
from cotrain_server.text_apis.generation import Generation, GenerationFailed, ShuttingDown
from cotrain_store.errors import BaseModelNotServed, StoreError, StoreUnavailable
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST

TextRequest = TypeVar("TextRequest", bound=BaseModel)

#: What a request can end with that is answered to its tenant; the middleware catches the rest.
REFUSED = (RequestError, StoreError, RequestValidationError, HTTPException, *CONNECTION_LOST)


class Refusal(NamedTuple):
    """An error in no API's words yet."""

    status: int
    message: str
    code: str
    retry_after_s: float | None = None


class InferenceRoute(DataRoute):
    """A tenant's route whose errors have a shape of their own (`error_body`)."""

    json_limits: ClassVar[JsonLimits] = CHATS

    @override
    def get_route_handler(self) -> Handler:
        """Answer what comes before the route in that shape, too."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except REFUSED as error:
                refusal = refusal_of(error)
                metrics.REQUESTS_REJECTED.labels(refusal.code).inc()
                body = self.error_body(refusal, request.state.request_id)
                return FiniteJSONResponse(body.model_dump(), refusal.status, _headers(refusal))

        return answer

    @staticmethod
    def error_body(refusal: Refusal, request_id: str) -> BaseModel:
        """Write an error as the API does that this route speaks for."""
        raise NotImplementedError


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called when the last is sent or the client has disconnected."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        # nginx would gather events otherwise
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._close = close

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def read_asked(
    request: Request, services: Services, tenant: TenantId, model: type[TextRequest]
) -> TextRequest:
    """Read the JSON of a request; raises Invalid with the name of its first wrong field."""
    content, weight = await json_body(request), body_weight(request)
    return await services.parser.parse_json(tenant, weight, _read, model, content)


def _read(model: type[TextRequest], content: bytes) -> TextRequest:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise Invalid(sentence(error.errors(include_url=False, include_input=False))) from error


async def finished(request: Request, generation: Generation) -> list[SampleResponse] | None:
    """Wait for all results; withdraw the requests and give None when the client hangs up."""
    try:
        return await while_connected(request.receive, generation.responses())
    finally:
        generation.close()


def responses(error: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Describe what a route may answer besides its JSON, for the OpenAPI page."""
    refused = {"model": error, "description": "The request was refused."}
    return dict.fromkeys((422, "4XX", "5XX"), refused)


#: For the OpenAPI page: a route that answers in pieces where it is asked to.
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """Write one server-sent event."""
    text = data if isinstance(data, str) else finite_json(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def refusal_of(error: Exception) -> Refusal:
    """Say what an error of REFUSED is to a tenant; of one that no tenant can cause, nothing more."""
    if isinstance(error, RequestValidationError):
        return Refusal(400, sentence(error.errors()), "invalid")
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail), "http_error")
    if isinstance(error, GenerationFailed):
        return Refusal(400 if error.category == "user" else 500, str(error), "generation_failed")
    if isinstance(error, CONNECTION_LOST):
        error = StoreUnavailable()
    status = _status_of(error)
    if status == 500:
        return Refusal(500, "Internal error.", "internal_error")
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(error, StoreUnavailable):
        retry_after_s = errors.UNAVAILABLE_RETRY_S
    return Refusal(status, str(error), errors.code_of(error), retry_after_s)


def _status_of(error: Exception) -> int:
    if isinstance(error, ShuttingDown):
        return 503
    # These APIs say so of an unknown model; the Tinker API says 400.
    return 404 if isinstance(error, BaseModelNotServed) else errors.status_of(error)


def _headers(refusal: Refusal) -> dict[str, str]:
    return {} if refusal.retry_after_s is None else {"Retry-After": f"{refusal.retry_after_s:g}"}
