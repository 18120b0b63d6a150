"""Errors of this package, with aliases that programs for the hosted services catch.

Programs use `except BiosAPIError` (or `TinkerError`, or `MintAPIError`) for all failures of their
service. Here these are aliases of `CotrainError`, the root of the tree in `errors`. So such a clause
catches rejections, broken connections and requests that failed after they were accepted.
"""

from cotrain import errors
from cotrain.errors import *  # noqa: F403  # its `__all__`, and no name twice
from cotrain.errors import CotrainError, MalformedMessage, RequestFailed

TinkerError = CotrainError
BiosAPIError = CotrainError
MintAPIError = CotrainError
# The official SDK's name for a request that was accepted and then failed.
RequestFailedError = RequestFailed
# …and for a response that cannot be parsed.
APIResponseValidationError = MalformedMessage

__all__ = [
    "APIResponseValidationError",
    "BiosAPIError",
    "MintAPIError",
    "RequestFailedError",
    "TinkerError",
]
__all__ += errors.__all__
