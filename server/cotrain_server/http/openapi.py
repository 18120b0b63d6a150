"""Describe in the OpenAPI bodies that routes parse without the framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain.wire.pass_codec import PROTOBUF

if TYPE_CHECKING:
    from pydantic import BaseModel


def body_of(*models: type[BaseModel], binary: bool = False) -> dict[str, Any]:
    """Describe a JSON body of one of these models, or with `binary` its message of the same name."""
    schemas = [_whole(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if binary:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


def _whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Put what a schema refers to in its place: within the OpenAPI its references lead nowhere."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items() if key != "discriminator"}

    whole: dict[str, Any] = resolve(schema)
    return whole
