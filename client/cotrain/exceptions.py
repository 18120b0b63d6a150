"""Every error of this package, also under the names that programs of the hosted services catch.

A program that says `except BiosAPIError` (or `TinkerError`, or `MintAPIError`) means whatever its
service answers badly. Here these are `CotrainError`, the root of the tree in `errors`, so that such
a clause catches refusals, broken connections and requests that failed after they were accepted.
"""

from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    CheckpointNotFound,
    ClientClosed,
    ConflictError,
    CotrainError,
    InternalServerError,
    MalformedMessage,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailed,
    SettingsMissing,
    TokenizerMissing,
    TorchMissing,
    UnprocessableEntityError,
    UnsupportedInput,
    VersionMismatch,
)

TinkerError = CotrainError
BiosAPIError = CotrainError
MintAPIError = CotrainError
# The official SDK's name for a request that was accepted and then failed.
RequestFailedError = RequestFailed
# …and for an answer that cannot be read.
APIResponseValidationError = MalformedMessage

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "BiosAPIError",
    "CheckpointNotFound",
    "ClientClosed",
    "ConflictError",
    "CotrainError",
    "InternalServerError",
    "MalformedMessage",
    "MintAPIError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailed",
    "RequestFailedError",
    "SettingsMissing",
    "TinkerError",
    "TokenizerMissing",
    "TorchMissing",
    "UnprocessableEntityError",
    "UnsupportedInput",
    "VersionMismatch",
]
