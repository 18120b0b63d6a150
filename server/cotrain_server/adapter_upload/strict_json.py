"""Strict parser of uploaded JSON: one object, unique names, limited depth, no extensions."""

import json
from typing import Any

from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable
from cotrain_server.http.request_body import MANY, count_json


def read_object(subject: str, content: bytes) -> dict[str, Any]:
    """Return a JSON object. `subject` starts the error message. Raises Invalid."""
    try:
        text = content.decode()  # only UTF-8, although json.loads would detect others
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
