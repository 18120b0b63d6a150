"""Typed refusals of the HTTP layer. `http/responses.py` has their responses.

`cotrain_store.errors.Reason` has the status, code and default message of every refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cotrain_store.errors import Reason, Refused, TypedRefusal

if TYPE_CHECKING:  # processes that check passes start faster without it
    from pydantic import ValidationError


class Unreadable(TypedRefusal):
    reason = Reason.UNREADABLE


class Invalid(TypedRefusal):
    reason = Reason.INVALID


class PromptTooLong(Invalid):
    """The prompt is longer than the context of its model."""


class BodyTooLarge(TypedRefusal):
    reason = Reason.BODY_TOO_LARGE


class TooManyFailures(TypedRefusal):
    reason = Reason.TOO_MANY_FAILURES


class InvalidToken(TypedRefusal):
    reason = Reason.INVALID_TOKEN
    #: SDK 0.38 gets a new token at this, and sends the request again (RFC 6750).
    challenge = 'Bearer error="invalid_token"'

    def __init__(self, *, expired: bool = False) -> None:
        super().__init__()
        self.expired = expired


class NotLoggedIn(TypedRefusal):
    reason = Reason.NOT_LOGGED_IN


#: For our own metrics only, because the client has disconnected.
CLIENT_CLOSED_REQUEST = 499


def status_of(error: Exception) -> int:
    """Return the status of an error; 500 for an error that no tenant can cause."""
    return error.reason.status if isinstance(error, Refused) else 500


def first_error(error: ValidationError) -> str:
    """Return the sentence of a model's validation error, without copies of a large input."""
    return sentence(error.errors(include_url=False, include_input=False))


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return pydantic's first error, with the field's path and without its value."""
    first = errors[0]
    path, found = _path(first["loc"]), first["msg"].removeprefix("Value error, ")
    if first.get("type") == "extra_forbidden":
        found = "There is no field of this name"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path}: {found}{more}." if path else f"{found}{more}."


def _path(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "body"]
    return "".join(parts).removeprefix(".")
