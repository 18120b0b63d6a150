"""Every error of this package, also under the names that programs of the hosted services catch.

A program that says `except BiosAPIError` (or `TinkerError`, or `MintAPIError`) means whatever its
service answers badly. Here these are `CotrainError`, the root of the tree in `errors`, so that such
a clause catches refusals, broken connections and requests that failed after they were accepted.
"""

from cotrain import errors
from cotrain.errors import *  # noqa: F403  # its `__all__`, and no name twice
from cotrain.errors import CotrainError, MalformedMessage, RequestFailed

TinkerError = CotrainError
BiosAPIError = CotrainError
MintAPIError = CotrainError
# The official SDK's name for a request that was accepted and then failed.
RequestFailedError = RequestFailed
# …and for an answer that cannot be read.
APIResponseValidationError = MalformedMessage

__all__ = [
    "APIResponseValidationError",
    "BiosAPIError",
    "MintAPIError",
    "RequestFailedError",
    "TinkerError",
]
__all__ += errors.__all__
