"""Result of a future, and usage of a sample request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Category = Literal["user", "server", "unknown"]


class ResultKind(StrEnum):
    """Encoding of a result's payload."""

    #: A JSON object, returned unchanged.
    JSON = "j"
    #: A serialized ForwardBackwardOutput message.
    PASS = "p"  # noqa: S105  # a forward pass
    #: A large JSON object; the payload is its spool reference.
    SPOOLED_JSON = "k"
    #: `{"error": …, "category": …}`: the op failed.
    FAILURE = "e"
    #: A large ForwardBackwardOutput message; the payload is its spool reference.
    SPOOLED_PASS = "r"  # noqa: S105  # a forward pass
    #: A serialized SampleResponse message.
    SAMPLE = "s"
    #: A large SampleResponse message; the payload is its spool reference.
    SPOOLED_SAMPLE = "t"


@dataclass(frozen=True)
class Result:
    """Result of a future: a kind and its payload."""

    kind: ResultKind
    payload: bytes

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Result:
        """Return the result of a JSON object."""
        return cls(ResultKind.JSON, json.dumps(value, separators=(",", ":")).encode())

    @classmethod
    def failed(cls, message: str, category: Category) -> Result:
        """Return a failure: a category and a sentence the tenant can act on."""
        payload = json.dumps({"error": message, "category": category}, separators=(",", ":"))
        return cls(ResultKind.FAILURE, payload.encode())

    def encode(self) -> bytes:
        """Return the result as one Redis value."""
        return self.kind.encode() + self.payload

    @classmethod
    def decode(cls, value: bytes) -> Result:
        """Return the result that `encode` wrote."""
        return cls(ResultKind(value[:1].decode()), value[1:])

    def json(self) -> dict[str, Any]:
        """Return the object of a JSON or failure payload."""
        decoded: dict[str, Any] = json.loads(self.payload)
        return decoded


@dataclass(frozen=True)
class SampleUsage:
    """Usage of one sample request. `cached_tokens` is the part of `prompt_tokens` that was not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0
