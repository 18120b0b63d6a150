"""Read JSON that a tenant uploaded: one object, no name twice, nothing deep, nothing that is no JSON."""

from __future__ import annotations

import json
from typing import Any

from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable
from cotrain_server.http.request_body import MANY, count_json


def read_object(subject: str, content: bytes) -> dict[str, Any]:
    """Read a JSON object; `subject` begins the sentence that refuses it. Raises Invalid."""
    try:
        text = content.decode()  # UTF-8 alone, whatever json.loads would guess
        count_json(content, MANY)
        value = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse)
    except (ValueError, Unreadable, BodyTooLarge) as error:
        raise Invalid(f"{subject} is not readable JSON.") from error
    if not isinstance(value, dict):
        raise Invalid(f"{subject} is not a JSON object.")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
