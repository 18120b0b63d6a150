"""Every question to the API about something that a tenant owns, from its OpenAPI.

A question is one field of one route that takes an id. The field has another tenant's id, and all
other ids of the body are the caller's own, so that only this field can be wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from tests.support.http_api import POOL, Api, sample_body
from tests.support.kl_bodies import kl_datum_body
from tests.support.operations import LOSS
from tests.support.uploads import adapter, tar

#: Fields and parameters that identify something a tenant owns.
IDS = {
    "model", "model_id", "model_path", "path", "reference_model_path", "request_id", "run_id",
    "sampling_session_id", "session_id", "source_path", "source_paths", "target", "tinker_path",
    "training_run_id", "upload_id",
}  # fmt: skip
API = "/api/v1/"
#: With a tenant's key these routes do not exist, whatever the id (`test_http_roles`).
OF_THE_OPERATOR = f"{API}admin/"
#: Fields with such a name that identify nothing: the name of a new checkpoint, and those that SDKs leave unset.
NO_IDS = {
    (f"{API}save_weights", "path"),
    (f"{API}save_weights_for_sampler", "path"),
    (f"{API}save_weights_external", "path"),
    (f"{API}asample", "model_path"),
}
#: Fields with the form of an id that are none: a client's own numbers and names.
NO_THINGS = {
    "custom_loss_seq_id", "destination_project_id", "model_seq_id", "model_seq_ids", "output_path", "project_id", "project_ids",
    "retrieved_request_ids", "sampling_session_seq_id", "seq_id",
}  # fmt: skip
CHAT = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
#: Other fields that a body needs besides the id in question. A value of `OWN` is the caller's own id.
OWN = object()
BODIES: dict[str, dict[str, Any]] = {
    "/anthropic/api/v1/messages": CHAT,
    "/anthropic/api/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/oai/api/v1/chat/completions": CHAT,
    "/oai/api/v1/responses": {"input": "a"},
    "/oai/api/v1/responses/input_tokens": {"input": "a"},
    "/oai/api/v1/completions": {"max_tokens": 4, "prompt": "a"},
    f"{API}asample": sample_body("", 1),
    f"{API}copy_weights": {"destination_project_id": "p"},
    f"{API}copy_weights session_id": {"source_path": OWN, "model_seq_id": 9},
    f"{API}create_custom_loss": LOSS,
    f"{API}create_model": {"model_seq_id": 7, "base_model": POOL.base_model},
    f"{API}create_sampling_session": {"sampling_session_seq_id": 7, "base_model": POOL.base_model},
    f"{API}create_sampling_session model_path": {"session_id": OWN, "sampling_session_seq_id": 8},
    f"{API}forward": {"forward_input": {}},
    f"{API}forward_backward": {"forward_backward_input": {}},
    f"{API}fork_run sampling_session_id": {"session_id": OWN, "model_seq_ids": [14]},
    f"{API}fork_run session_id": {"sampling_session_id": OWN, "model_seq_ids": [14]},
    f"{API}load_weights model_id": {"path": OWN},
    f"{API}load_weights path": {"session_id": OWN, "model_seq_id": 10},
    f"{API}load_weights session_id": {"path": OWN, "model_seq_id": 11},
    f"{API}mint/checkpoints/interpolate": {"coefficients": [1.0], "output_path": "mixed"},
    f"{API}mint/forward_backward_reverse_kl": {"reference_model_path": POOL.base_model, "data": [kl_datum_body()]},
    f"{API}mint/forward_backward_reverse_kl reference_model_path": {"model_id": OWN, "data": [kl_datum_body()]},
    f"{API}optim_step": {"adam_params": {}},
    f"{API}save_weights": {"path": "b"},
    f"{API}save_weights_for_sampler": {"path": "b"},
    f"{API}save_weights_external": {"path": "b"},
    f"{API}sessions/{{session_id}}/finish": {"reason": {"type": "success"}},
    f"{API}sessions/{{session_id}}/project": {"project_id": "p"},
    f"{API}training_runs/{{run_id}}": {"note": "of mine"},
    f"{API}training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}/ttl": {"ttl_seconds": None},
}
#: Routes that end something, the last one at the end: later questions would not find it.
ENDS = [
    ("delete", f"{API}training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}"),
    ("post", f"{API}unload_model"),
    ("post", f"{API}sessions/{{session_id}}/finish"),
]


@dataclass(frozen=True)
class Question:
    """One field of one route that takes an id."""

    method: str
    path: str
    field: str
    place: Literal["path", "query", "body"]

    @property
    def name(self) -> str:
        """Label in a failed test."""
        return f"{self.method.upper()} {self.path} {self.field}"


def questions_of(openapi: dict[str, Any]) -> list[Question]:
    """Return every question, with those that end something last."""
    found = [
        Question(method, path, field, place)
        for path, methods in _of_tenants(openapi).items()
        for method, operation in methods.items()
        for field, place in _fields(operation, openapi["components"]["schemas"])
        if field in IDS and (path, field) not in NO_IDS
    ]
    return sorted(found, key=_is_end)


def unasked_fields(openapi: dict[str, Any]) -> set[str]:
    """Return the fields that have the form of an id, but are part of no question."""
    fields = {
        field
        for methods in _of_tenants(openapi).values()
        for operation in methods.values()
        for field, _ in _fields(operation, openapi["components"]["schemas"])
    }
    return {field for field in fields - IDS - NO_THINGS if re.search(r"(_id|path)s?$", field)}


def _of_tenants(openapi: dict[str, Any]) -> dict[str, Any]:
    paths = openapi["paths"].items()
    return {path: methods for path, methods in paths if not path.startswith(OF_THE_OPERATOR)}


def _is_end(question: Question) -> int:
    place = (question.method, question.path)
    return ENDS.index(place) + 1 if place in ENDS else 0


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[tuple[str, Any]]:
    parameters = {(p["name"], p["in"]) for p in operation.get("parameters", []) if p["in"] != "header"}
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    properties = {name for shape in (schema, *schema.get("anyOf", [])) for name in shape.get("properties", {})}
    return sorted(parameters | {(name, "body") for name in properties})


def ids_of(run: str, sampler: str, request_id: str, upload_id: str) -> dict[str, Any]:
    """Return the ids of everything that a tenant has, in their wire format. Its checkpoint is `a`."""
    path = f"tinker://{run}/weights/a"
    return {
        "model": path,
        "model_id": run,
        "model_path": path,
        "path": path,
        "reference_model_path": path,
        "request_id": request_id,
        "run_id": run,
        "sampling_session_id": sampler,
        "session_id": run.partition(":")[0],
        "source_path": path,
        "source_paths": [path],
        "target": {"type": "sampling_session", "sampling_session_id": sampler},
        "tinker_path": path,
        "training_run_id": run,
        "upload_id": upload_id,
    }


def unknown_ids(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the session in every id by one that no tenant has."""

    def unknown(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: unknown(part) for name, part in value.items()}
        if isinstance(value, list):
            return [unknown(part) for part in value]
        return re.sub("[0-9a-f]{32}", "0" * 32, value)

    return {name: unknown(value) for name, value in ids.items()}


async def ask(
    api: Api, question: Question, about: Mapping[str, Any], own: Mapping[str, Any], key: str, seqs: itertools.count[int]
) -> httpx.Response:
    """Send a question about one of these ids. The other fields have the ids of `own`, the caller's."""
    path, field = question.path, question.field
    body = BODIES.get(f"{path} {field}", BODIES.get(path, {}))
    body = {name: own[name] if value is OWN else value for name, value in body.items()}
    if "model_id" in {field, *body} and not path.startswith(f"{API}mint/"):
        body["seq_id"] = next(seqs)
    if question.place == "body":
        body[field] = about[field]
    parts = {"kind": "weights", "name": "a", **about}
    headers = {"X-API-Key": key}
    if path == f"{API}training_runs/upload":
        query = {"base_model": POOL.base_model, "name": "a", "model_seq_id": "12"}
        return await api.http.request(
            question.method, path, params={**query, field: about[field]}, headers=headers,
            content=tar(adapter()),
        )  # fmt: skip
    takes_body = question.method in {"post", "put", "patch"}
    return await api.http.request(
        question.method, path.format(**parts), headers=headers, json=body if takes_body else None
    )
