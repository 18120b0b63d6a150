"""Errors a user of the client meets.

CotrainError
├── SettingsMissing                 (no server address or key was given, or a wrong one)
├── ClientClosed
├── UnsupportedInput                (a datum this server cannot train on; also a ValueError)
├── TokenizerMissing                (no transformers here, or no such tokenizer)
├── TorchMissing                    (a custom loss without torch; also an ImportError)
├── VersionMismatch                 (this server and this client would misread each other)
├── MalformedMessage                (bytes that are not the message they should be)
├── RequestFailed                   (accepted, then failed: category user, server or unknown)
│   └── CheckpointNotFound          (also a NotFoundError: what it was to load is not there)
└── APIError
    ├── APIConnectionError          (no answer)
    │   ├── APITimeoutError
    │   └── ForeignAnswer           (something else answered; also a MalformedMessage)
    └── APIStatusError              (an answer that says no: `status_code`, `body`)
        ├── BadRequestError             400
        ├── AuthenticationError         401
        ├── BillingError                402 (of a proxy: no server of ours bills)
        ├── PermissionDeniedError       403
        ├── NotFoundError               404
        ├── ConflictError               409 (of a proxy: no server of ours says so)
        ├── UnprocessableEntityError    422
        ├── RateLimitError              429, after every retry
        └── InternalServerError         5xx, after every retry
"""

from __future__ import annotations

from typing import Any, Literal

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "CheckpointNotFound",
    "ClientClosed",
    "ConflictError",
    "CotrainError",
    "ForeignAnswer",
    "InternalServerError",
    "MalformedMessage",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailed",
    "SettingsMissing",
    "TokenizerMissing",
    "TorchMissing",
    "UnprocessableEntityError",
    "UnsupportedInput",
    "VersionMismatch",
]

Category = Literal["user", "server", "unknown"]
"""Whose fault a failure is: the request's, the server's, or not known."""


class CotrainError(Exception):
    """Something went wrong between this client and its server."""


class SettingsMissing(CotrainError):
    """A setting that the client needs is missing or cannot be."""


class ClientClosed(CotrainError):
    """The client was closed."""


class UnsupportedInput(CotrainError, ValueError):
    """This server cannot train on such an input."""


class TokenizerMissing(CotrainError):
    """The tokenizer of a base model cannot be loaded here."""


class TorchMissing(CotrainError, ImportError):
    """A loss of the caller's own needs torch, which is not installed here."""


class VersionMismatch(CotrainError):
    """This server and this client would misread each other."""


class MalformedMessage(CotrainError):
    """These bytes are not the message they should be."""


class RequestFailed(CotrainError):
    """The server accepted this request and then failed it; the run goes on without it."""

    def __init__(self, message: str, request_id: str, category: Category) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category


class APIError(CotrainError):
    """A call of the API did not succeed."""


class APIConnectionError(APIError):
    """The server gave no answer."""


class APITimeoutError(APIConnectionError):
    """The server gave no answer in time."""


class ForeignAnswer(APIConnectionError, MalformedMessage):
    """Something other than the server answered: a login page, a redirect, a maintenance notice."""


class APIStatusError(APIError):
    """The server answered that it will not do this."""

    def __init__(
        self,
        message: str,
        status_code: int,
        body: Any,
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{status_code}: {message}")
        self.message = message
        self.status_code = status_code
        self.body = body
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        """What to ask the server's operator about; "" where the server did not say."""
        if request_id:
            self.add_note(f"The server's log has this as request {request_id}.")


class BadRequestError(APIStatusError):
    """The request is wrong."""


class AuthenticationError(APIStatusError):
    """The API key is missing, wrong or expired."""


class BillingError(APIStatusError):
    """Something before the server wants to be paid."""


class PermissionDeniedError(APIStatusError):
    """This key may not do this."""


class NotFoundError(APIStatusError):
    """There is no such thing, or it is not yours."""


class ConflictError(APIStatusError):
    """Something before the server holds another state than the request expects."""


class CheckpointNotFound(RequestFailed, NotFoundError):
    """The checkpoint that an accepted request was to load is not there, or not yours."""

    def __init__(self, message: str, request_id: str) -> None:
        APIStatusError.__init__(self, message, 404, None)
        self.request_id = request_id
        self.category = "user"


class UnprocessableEntityError(APIStatusError):
    """The request cannot be read as what it should be."""


class RateLimitError(APIStatusError):
    """Too much is waiting already."""


class InternalServerError(APIStatusError):
    """The server failed."""


_ERROR_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(
    status_code: int,
    message: str,
    body: Any,
    retry_after_s: float | None = None,
    request_id: str = "",
) -> APIStatusError:
    """Make the most specific error for an HTTP status."""
    general = InternalServerError if status_code >= 500 else APIStatusError
    error_class = _ERROR_BY_STATUS.get(status_code, general)
    return error_class(message, status_code, body, retry_after_s, request_id)
