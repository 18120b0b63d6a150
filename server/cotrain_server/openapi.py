"""Describe in the OpenAPI what a route reads by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain.codec import PROTOBUF

if TYPE_CHECKING:
    from pydantic import BaseModel


def body_of(model: type[BaseModel], *, binary: bool = False) -> dict[str, Any]:
    """Describe a JSON body of this model, or with `binary` its message of the same name."""
    content: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    if binary:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}
