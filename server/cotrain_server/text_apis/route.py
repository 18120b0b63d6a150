"""Routes of another API: their requests, and errors in its format."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from cotrain_server.errors import Invalid, PromptTooLong, first_error, sentence
from cotrain_server.http.request_body import CHATS, JsonLimits, body_weight, json_body
from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import DataRoute, Handler
from cotrain_server.services import Services
from cotrain_server.text_apis.generation import GenerationFailed
from cotrain_store.errors import BaseModelNotServed, Reason, Refused, StoreError, StoreUnavailable
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST

#: Errors that are answered to the tenant. The middleware catches all others.
ANSWERED = (StoreError, RequestValidationError, HTTPException, *CONNECTION_LOST)
#: Codes of requests whose `model` is unknown, deleted or malformed.
_NO_MODEL_CODES = frozenset(
    reason.code
    for reason in (
        Reason.BASE_MODEL_NOT_SERVED,
        Reason.CHECKPOINT_NOT_FOUND,
        Reason.MALFORMED_PATH,
        Reason.WEIGHTS_DELETED,
    )
)


class Refusal(NamedTuple):
    """An error before conversion to an API's format."""

    status: int
    message: str
    code: str
    retry_after_s: float | None = None
    is_too_long: bool = False  # True if the prompt is longer than the context of the model

    @property
    def names_no_model(self) -> bool:
        """True if the tenant has no model of the requested name."""
        return self.code in _NO_MODEL_CODES


class InferenceRoute(DataRoute):
    """A tenant's route with its own error format (`error_body`)."""

    json_limits: ClassVar[JsonLimits] = CHATS
    base_url: ClassVar[str]  # Path of the API, for clients

    @override
    def get_route_handler(self) -> Handler:
        """Return a handler that also answers errors before the route in that format."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ANSWERED as error:
                refusal = refusal_of(error)
                metrics.REQUESTS_REJECTED.labels(refusal.code).inc()
                body = self.error_body(refusal, request.state.request_id)
                return FiniteJSONResponse(body.model_dump(), refusal.status, _headers(refusal))

        return answer

    @classmethod
    def error_outside(cls, status: int, message: str, code: str, request_id: str) -> Response:
        """Return an error outside all routes, such as an unknown path. It names the base URL."""
        if status == 404:
            message = f"There is no such endpoint. The base_url of a client ends in {cls.base_url}."
        body = cls.error_body(Refusal(status, message, code), request_id)
        return FiniteJSONResponse(body.model_dump(), status)

    @staticmethod
    def error_body(refusal: Refusal, request_id: str) -> BaseModel:
        """Return an error in the format of this route's API."""
        raise NotImplementedError


class Fields(BaseModel):
    """Fields of a request, including those that its model does not define (`model_extra`)."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    #: Undefined fields that change no result with any value.
    harmless: ClassVar[Collection[str]] = ()
    #: Undefined fields, and their values that request nothing.
    neutral: ClassVar[Mapping[str, Collection[object]]] = {}

    def check(self, where: str = "") -> None:
        """Raise Invalid for the first undefined field that would change the result. An unknown field is refused,
        because its caller may rely on it.
        """
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.harmless or value in self.neutral.get(name, ()):
                continue
            raise Invalid(f"{where}{name} is not supported here.")


class TextRequest(Fields):
    """Request for text of a model."""

    model: Annotated[str, Field(min_length=1, max_length=2048)]
    """A base model, a `tinker://` path, or `<base model>;<path>`."""


Wanted = TypeVar("Wanted", bound=TextRequest)


async def read_request(request: Request, services: Services, tenant: TenantId, model: type[Wanted]) -> Wanted:
    """Parse and check the JSON of a request. Raises Invalid with the name of its first wrong field."""
    content, weight = await json_body(request), body_weight(request)
    wanted: Wanted = await services.parser.parse_json(tenant, weight, _read, model, content)
    wanted.check()
    return wanted


def _read(model: type[Wanted], content: bytes) -> Wanted:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise Invalid(first_error(error)) from error


def responses(error: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a route's error responses."""
    refused = {"model": error, "description": "The request was refused."}
    return dict.fromkeys((422, "4XX", "5XX"), refused)


#: OpenAPI description of a route that can stream its answer.
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def refusal_of(error: Exception) -> Refusal:
    """Return a refusal for an error of ANSWERED. Errors that no tenant can cause reveal no details."""
    if isinstance(error, RequestValidationError):
        return Refusal(400, sentence(error.errors()), "invalid")
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail), "http_error")
    if isinstance(error, GenerationFailed):
        return Refusal(400 if error.category == "user" else 500, str(error), "generation_failed")
    if isinstance(error, CONNECTION_LOST):
        error = StoreUnavailable()
    if not isinstance(error, Refused):
        return Refusal(500, "Internal error.", "internal_error")
    reason = error.reason
    # These APIs answer 404 for an unknown model; the Tinker API answers 400.
    status = 404 if isinstance(error, BaseModelNotServed) else reason.status
    is_too_long = isinstance(error, PromptTooLong)
    return Refusal(status, str(error), reason.code, reason.retry_after_s, is_too_long)


def _headers(refusal: Refusal) -> dict[str, str]:
    return {} if refusal.retry_after_s is None else {"Retry-After": f"{refusal.retry_after_s:g}"}
