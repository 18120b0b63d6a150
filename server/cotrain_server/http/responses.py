"""JSON responses: of all errors, with their handlers, and of values that may contain tenants' data."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import override

from cotrain_server.errors import InvalidToken, sentence
from cotrain_store.errors import Refused, StoreError, StoreUnavailable
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST


class ErrorBody(BaseModel):
    """Body of every refusal."""

    detail: str  # Message for the sender of the request
    code: str  # Machine-readable code of the error
    request_id: str  # Reference for questions to the operator


#: Error responses of every endpoint, for the OpenAPI page.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    422: {"model": ErrorBody, "description": "A field is wrong."},
    "4XX": {"model": ErrorBody, "description": "The request was refused."},
    "5XX": {"model": ErrorBody, "description": "The server could not answer."},
}

#: Response of a status, message, code and request id.
ErrorFormat = Callable[[int, str, str, str], Response]


def install(app: FastAPI, formats: Mapping[str, ErrorFormat]) -> None:
    """Register handlers for all errors. The middleware catches all others.

    `formats` are error formats of other APIs, by the start of their paths.
    """
    app.state.error_formats = formats
    app.add_exception_handler(StoreError, _answer_known)
    for lost in CONNECTION_LOST:
        app.add_exception_handler(lost, _answer_lost)
    app.add_exception_handler(RequestValidationError, _answer_schema)
    app.add_exception_handler(HTTPException, _answer_http)


def error_response(
    status: int, message: str, code: str, request_id: str, retry_after_s: float | None = None
) -> JSONResponse:
    """Return the response of a refusal."""
    headers = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
    body = ErrorBody(detail=message, code=code, request_id=request_id)
    return JSONResponse(body.model_dump(), status, headers)


def error_at(scope: Scope, status: int, message: str, code: str, request_id: str) -> Response:
    """Return the response of an error outside all routes, in the format of the API of its path."""
    formats: Mapping[str, ErrorFormat] = scope["app"].state.error_formats
    path: str = scope["path"]
    found = (make for start, make in formats.items() if path.startswith(start))
    return next(found, error_response)(status, message, code, request_id)


def internal_error_at(scope: Scope, request_id: str) -> Response:
    """Return the response of an unexpected error, in the format of the API of its path."""
    return error_at(scope, *_internal_error(request_id))


def _internal_error(request_id: str) -> tuple[int, str, str, str]:
    """Return the arguments of an `ErrorFormat`: a reference to the log, without details."""
    return 500, f"Internal error (ref {request_id}).", "internal_error", request_id


def refusal(error: Exception, request_id: str) -> JSONResponse:
    """Return the response of an error. Count it in the metrics if it is a refusal."""
    if not isinstance(error, Refused):
        return error_response(*_internal_error(request_id))
    reason = error.reason
    metrics.REQUESTS_REJECTED.labels(reason.code).inc()
    answer = error_response(reason.status, str(error), reason.code, request_id, reason.retry_after_s)
    if isinstance(error, InvalidToken):
        answer.headers["WWW-Authenticate"] = error.challenge
    return answer


def schema_refusal(errors: Sequence[Mapping[str, Any]], request_id: str) -> JSONResponse:
    """Return the response of a pydantic validation error, and count it."""
    metrics.REQUESTS_REJECTED.labels("invalid").inc()
    return error_response(422, sentence(errors), "invalid", request_id)


async def _answer_known(request: Request, error: Exception) -> JSONResponse:
    return refusal(error, request.state.request_id)


async def _answer_lost(request: Request, error: Exception) -> JSONResponse:
    return refusal(StoreUnavailable(), request.state.request_id)


async def _answer_schema(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return schema_refusal(error.errors(), request.state.request_id)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)  # `Allow` has the methods of the path
    message = str(error.detail)
    code = "_".join(message.lower().split())
    answer = error_at(request.scope, error.status_code, message, code, request.state.request_id)
    answer.headers.update(error.headers or {})
    return answer


class FiniteJSONResponse(JSONResponse):
    """JSON response for any numbers and texts: without NaN and infinity, which JSON lacks."""

    @override
    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return finite_json(content).encode()


def finite_json(value: Any) -> str:
    """Return compact JSON in ASCII, which can also represent half a surrogate pair. NaN and infinities become null."""
    try:
        return _written(value)
    except ValueError:
        return _written(finite(value))


def finite(value: Any) -> Any:
    """Return a JSON value with None for NaN, infinities, and integers beyond the range of a double."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value if _is_double(value) else None


def _written(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _is_double(value: Any) -> bool:
    """Return True if a value is not a number, or is within the range of a double."""
    if not isinstance(value, int | float):
        return True
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
