"""Errors of the HTTP edge, and the table that maps every error to its status.

The docstring of an error class is its default message. The reaction of SDKs to each status determines the
table: they repeat 408, 409, 429 and 5xx, pause for an hour at 402, and treat all others as final.

Subclasses of `RequestError`:

* `Unreadable`: not the JSON, protobuf or zstd that it claims to be
* `Invalid`: readable, but not valid for this endpoint
* `BodyTooLarge`
* `BodyTooSlow`
* `UnsupportedMediaType`
* `TooManyFailures`: wrong API keys from one address
* `TooManyPolls`: held open by one tenant
* `TooManyBodies`: sent at once by one tenant
* `TooManyConnections`: in use by one tenant
* `TooManyUploads`: sent at once by one tenant
* `InvalidToken`: not ours, expired, or its key was revoked
* `BadLink`: to a file
* `NotLoggedIn`: to the web pages
* `MissingFormToken`: of a page's form
* `KeyOfTheOperator`: its tenant cannot revoke it
* `ReadOnlyKey`: a viewer's, and the request would change something
* `OperatorsOnly`: answered as if the endpoint did not exist
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cotrain_store import errors as store
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST


class RequestError(Exception):
    """The request was refused."""

    retry_after_s: float | None = None

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class Unreadable(RequestError):
    """The request body cannot be read."""


class Invalid(RequestError):
    """The request is not valid."""


class BodyTooLarge(RequestError):
    """Request body exceeds the limit."""


class BodyTooSlow(RequestError):
    """The request body did not arrive in time."""


class UnsupportedMediaType(RequestError):
    """The request body has a type that this endpoint does not take."""


class TooManyFailures(RequestError):
    """Too many failed attempts from this address; wait a minute."""

    retry_after_s = 60.0


class TooManyPolls(RequestError):
    """Too many requests of this tenant are waiting for results."""

    retry_after_s = 1.0


class InvalidToken(RequestError):
    """The token is expired or not valid; get a new one with your API key."""

    #: SDK 0.38 gets a new token at this, and sends the request again (RFC 6750).
    challenge = 'Bearer error="invalid_token"'

    def __init__(self, *, expired: bool = False) -> None:
        super().__init__()
        self.expired = expired


class BadLink(RequestError):
    """Link expired or invalid."""


class NotLoggedIn(RequestError):
    """Log in first, or show an API key."""


class MissingFormToken(RequestError):
    """This form did not come from a page of this session. Load the page again, and send it once more."""


class KeyOfTheOperator(RequestError):
    """This API key stands in the server's settings; only its operator can take it back."""


class TooManyBodies(RequestError):
    """Too many bytes of this tenant are on their way; send fewer requests at once."""

    retry_after_s = 1.0


class TooManyConnections(RequestError):
    """Too many requests of this tenant are open; send fewer at once."""

    retry_after_s = 1.0


class TooManyUploads(RequestError):
    """Too many uploads of this tenant are on their way."""

    retry_after_s = 5.0


class ReadOnlyKey(RequestError):
    """This API key is a viewer's: it may only read. The operator can make one of a member."""


class OperatorsOnly(RequestError):
    """Not Found"""


#: First match wins, so specific classes precede general ones.
STATUS_BY_ERROR: Sequence[tuple[type[Exception], int]] = (
    (Unreadable, 400),
    (Invalid, 400),
    (BodyTooLarge, 413),
    (BodyTooSlow, 408),
    (UnsupportedMediaType, 415),
    (TooManyFailures, 429),
    (TooManyPolls, 429),
    (TooManyBodies, 429),
    (TooManyConnections, 429),
    (TooManyUploads, 429),
    (InvalidToken, 401),
    (BadLink, 403),
    (NotLoggedIn, 401),
    (MissingFormToken, 403),
    (KeyOfTheOperator, 403),
    (ReadOnlyKey, 403),
    (OperatorsOnly, 404),
    (store.BaseModelNotServed, 400),
    # The SDK samples again after 410, which such a request needs.
    (store.SampleExpired, 410),
    (store.NotFound, 404),
    (store.AuthenticationFailed, 401),
    # The SDK's heartbeat stops at 410. Training never receives a 410: a finished session's runs are
    # closed, and the SDK would send the same op again under a new seq_id.
    (store.SessionFinished, 410),
    # Never 409: the SDK repeats it silently for five minutes.
    (store.Refused, 400),
    (store.DiskReserveReached, 503),
    (store.BaseModelStarting, 503),
    (store.Busy, 429),
    (store.StoreUnavailable, 503),
)


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

#: Delay before a client retries while Redis restarts, in seconds.
UNAVAILABLE_RETRY_S = 1.0


def install(app: FastAPI) -> None:
    """Register handlers for all errors of this module. The middleware catches all others."""
    app.add_exception_handler(RequestError, _answer_known)
    app.add_exception_handler(store.StoreError, _answer_known)
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


def ambiguous_length(request_id: str) -> JSONResponse:
    """Refuse a request that declares its length twice, and close its connection: the following
    bytes may be its body.
    """
    answer = error_response(
        400,
        "Send Content-Length or Transfer-Encoding, not both.",
        "ambiguous_length",
        request_id,
    )
    answer.headers["connection"] = "close"
    return answer


def internal_error(request_id: str) -> JSONResponse:
    """Return the response of an unexpected error, with a reference to the log and without details."""
    return error_response(500, f"Internal error (ref {request_id}).", "internal_error", request_id)


def status_of(error: Exception) -> int:
    """Return the status of an error; 500 for an error that no tenant can cause."""
    return next((status for known, status in STATUS_BY_ERROR if isinstance(error, known)), 500)


def code_of(error: Exception) -> str:
    """Return the machine-readable code of an error: `QueueFull` → `queue_full`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


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
    """Return the response of an error in the table, and count it."""
    status = status_of(error)
    if status == 500:
        return internal_error(request_id)
    metrics.REQUESTS_REJECTED.labels(code_of(error)).inc()
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(error, store.StoreUnavailable):
        retry_after_s = UNAVAILABLE_RETRY_S
    answer = error_response(status, str(error), code_of(error), request_id, retry_after_s)
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
    return refusal(store.StoreUnavailable(), request.state.request_id)


async def _answer_schema(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return schema_refusal(error.errors(), request.state.request_id)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "_".join(str(error.detail).lower().split())
    return error_response(error.status_code, str(error.detail), code, request.state.request_id)
