"""How a message is written as JSON and read again, in the next version as well."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

_Message = TypeVar("_Message")


def encode(record: Any) -> str:
    """Write a dataclass of this package as compact JSON.

    Half a surrogate pair, which a tenant's text may hold, is no Unicode: the scripts could not read it.
    """
    text = json.dumps(asdict(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def decode(message: type[_Message], raw: Mapping[str, Any]) -> _Message:
    """Build a message of what `encode` wrote, in this version or the next: unknown fields are dropped."""
    known = {field.name for field in fields(message)}  # type: ignore[arg-type]  # always a dataclass
    return message(**{name: value for name, value in raw.items() if name in known})
