"""Typed refusals of the HTTP layer, and the responses of all errors.

`cotrain_store.errors.Reason` has the status, code and default message of every refusal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cotrain_store.errors import Reason, Refused, StoreError, StoreUnavailable, TypedRefusal
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST


class Unreadable(TypedRefusal):
    """The body is not the JSON, protobuf or zstd that it claims to be."""

    reason = Reason.UNREADABLE


class Invalid(TypedRefusal):
    """The body is readable, but not valid for this endpoint."""

    reason = Reason.INVALID


class BodyTooLarge(TypedRefusal):
    """The body exceeds a limit."""

    reason = Reason.BODY_TOO_LARGE


class TooManyFailures(TypedRefusal):
    """One address has sent too many wrong API keys."""

    reason = Reason.TOO_MANY_FAILURES


class InvalidToken(TypedRefusal):
    """The token is foreign or expired, or its key was revoked."""

    reason = Reason.INVALID_TOKEN
    #: SDK 0.38 gets a new token at this, and sends the request again (RFC 6750).
    challenge = 'Bearer error="invalid_token"'

    def __init__(self, *, expired: bool = False) -> None:
        super().__init__()
        self.expired = expired


class NotLoggedIn(TypedRefusal):
    """The request for a page has no session and no key."""

    reason = Reason.NOT_LOGGED_IN


class ErrorBody(BaseModel):
    """Body of every refusal."""

    detail: str
    """Message for the sender of the request."""
    code: str
    """Machine-readable code of the error."""
    request_id: str
    """Reference for questions to the operator."""


#: Error responses of every endpoint, for the OpenAPI page.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    422: {"model": ErrorBody, "description": "A field is wrong."},
    "4XX": {"model": ErrorBody, "description": "The request was refused."},
    "5XX": {"model": ErrorBody, "description": "The server could not answer."},
}

#: For our own metrics only, because the client has disconnected.
CLIENT_CLOSED_REQUEST = 499


def install(app: FastAPI) -> None:
    """Register handlers for all errors of this module. The middleware catches all others."""
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


def internal_error(request_id: str) -> JSONResponse:
    """Return the response of an unexpected error, with a reference to the log and without details."""
    return error_response(500, f"Internal error (ref {request_id}).", "internal_error", request_id)


def status_of(error: Exception) -> int:
    """Return the status of an error; 500 for an error that no tenant can cause."""
    return error.reason.status if isinstance(error, Refused) else 500


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return pydantic's first error, with the field's path and without its value."""
    first = errors[0]
    path, found = _path(first["loc"]), first["msg"].removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path}: {found}{more}." if path else f"{found}{more}."


def _path(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "body"]
    return "".join(parts).removeprefix(".")


def refusal(error: Exception, request_id: str) -> JSONResponse:
    """Return the response of an error, and count a refusal."""
    if not isinstance(error, Refused):
        return internal_error(request_id)
    reason = error.reason
    metrics.REQUESTS_REJECTED.labels(reason.code).inc()
    answer = error_response(
        reason.status, str(error), reason.code, request_id, reason.retry_after_s
    )
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


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "_".join(str(error.detail).lower().split())
    return error_response(error.status_code, str(error.detail), code, request.state.request_id)
