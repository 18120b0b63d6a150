"""Errors that a user of the client can see.

`docs/guide/errors-and-retries.md` lists causes and remedies.

Programs for the hosted services catch all failures of their service as `TinkerError`, `BiosAPIError` or
`MintAPIError`. Here these are names of `CotrainError`. So such a clause catches rejections, broken connections
and requests that failed after they were accepted.
"""

from typing import Any, Literal

__all__ = [
    "APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError",
    "AuthenticationError", "BadRequestError", "BillingError", "BiosAPIError", "CheckpointNotFound",
    "ClientClosed", "ConflictError", "CotrainError", "ExportFailed", "ForeignAnswer", "InternalServerError",
    "LibraryMissing", "MalformedMessage", "MintAPIError", "NotFoundError", "PermissionDeniedError",
    "RateLimitError", "RequestFailed", "RequestFailedError", "SettingsMissing", "TinkerError", "TokenizerMissing",
    "TorchMissing", "UnprocessableEntityError", "UnsupportedInput", "VersionMismatch",
]  # fmt: skip

Category = Literal["user", "server", "unknown"]
"""Cause of a failure: the request, the server, or unknown."""


class CotrainError(Exception):
    """Base of all errors of this client."""


class SettingsMissing(CotrainError):
    """A required setting is missing or invalid."""


class ClientClosed(CotrainError):
    """The client was closed."""


class UnsupportedInput(CotrainError, ValueError):
    """This server cannot train on this input."""


class TokenizerMissing(CotrainError):
    """The tokenizer of a base model cannot be loaded here."""


class TorchMissing(CotrainError, ImportError):
    """A custom loss needs torch, which is not installed here."""


class LibraryMissing(CotrainError, ImportError):
    """An export needs a library or a program that is not installed here."""


class ExportFailed(CotrainError):
    """The export is impossible, or its log-probs differ from the server's."""


class VersionMismatch(CotrainError):
    """Server and client use incompatible protocol versions."""


class MalformedMessage(CotrainError):
    """Bytes cannot be parsed as the expected message."""


class RequestFailed(CotrainError):
    """The server accepted this request and then failed it; the run continues without it."""

    def __init__(self, message: str, request_id: str, category: Category) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category


class APIError(CotrainError):
    """A call of the API failed."""


class APIConnectionError(APIError):
    """The server did not respond."""


class APITimeoutError(APIConnectionError):
    """The server did not respond in time."""


class ForeignAnswer(APIConnectionError, MalformedMessage):
    """An intermediary responded instead of the server: a login page, a redirect, a maintenance notice."""


class APIStatusError(APIError):
    """The server rejected the request."""

    def __init__(
        self, message: str, status_code: int, body: Any, retry_after_s: float | None = None, request_id: str = ""
    ) -> None:
        super().__init__(f"{status_code}: {message}")
        self.message = message
        self.status_code = status_code
        self.body = body
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        """Id of the request in the server's log, for its operator; "" if the server sent none."""
        if request_id:
            self.add_note(f"The server's log has this as request {request_id}.")


class BadRequestError(APIStatusError):
    """The request is invalid."""


class AuthenticationError(APIStatusError):
    """The API key is missing, wrong or expired."""


class BillingError(APIStatusError):
    """An intermediary requires payment."""


class PermissionDeniedError(APIStatusError):
    """This key has no permission for this request."""


class NotFoundError(APIStatusError):
    """The resource does not exist, or belongs to another tenant."""


class ConflictError(APIStatusError):
    """An intermediary has another state than the request expects."""


class CheckpointNotFound(RequestFailed, NotFoundError):
    """The checkpoint that an accepted request loads does not exist, or belongs to another tenant."""

    def __init__(self, message: str, request_id: str) -> None:
        APIStatusError.__init__(self, message, 404, None)
        self.request_id = request_id
        self.category = "user"


class UnprocessableEntityError(APIStatusError):
    """The request does not match the expected format."""


class RateLimitError(APIStatusError):
    """Too many requests are waiting."""


class InternalServerError(APIStatusError):
    """The server failed."""


TinkerError = CotrainError
BiosAPIError = CotrainError
MintAPIError = CotrainError
# The official SDK's names for a request that was accepted and then failed, and for a response that cannot be parsed.
RequestFailedError = RequestFailed
APIResponseValidationError = MalformedMessage

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
    status_code: int, message: str, body: Any, retry_after_s: float | None = None, request_id: str = ""
) -> APIStatusError:
    """Return the most specific error for an HTTP status."""
    general = InternalServerError if status_code >= 500 else APIStatusError
    error_class = _ERROR_BY_STATUS.get(status_code, general)
    return error_class(message, status_code, body, retry_after_s, request_id)
