"""Requests about checkpoints in the form that SDKs send. A stand-in executes the worker's part."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.http_api import ALICE, Api
from tests.support.stand_in import StandIn

#: Route that saves each kind of checkpoint.
SAVES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


async def result(api: Api, worker: StandIn, answer: httpx.Response, key: str = ALICE) -> Any:
    """Execute the queued ops. Return the result of the request."""
    assert answer.status_code == 200, answer.text
    await worker.run_log()
    return (await api.post("retrieve_future", answer.json(), key)).json()


#: Field of an export that is encrypted, for a key that was discarded.
LOCKED = {"age_encryption_recipients": ["age164q2x3vl64uamwjgl97z2hn8ryqe9l8agdcwzaztf4uwk5vljv4qftk6j7"]}


async def save(api: Api, worker: StandIn, run: str, seq: int, kind: str = "weights", **fields: Any) -> Any:
    """Save, by default under the name `a`. Return the result of the save."""
    key = fields.pop("key", ALICE)
    body = {"model_id": run, "seq_id": seq, "path": "a", **fields}
    return await result(api, worker, await api.post(SAVES[kind], body, key), key)


async def load(api: Api, run: str, seq: int, path: str, **fields: Any) -> httpx.Response:
    """Load into a run."""
    key = fields.pop("key", ALICE)
    body = {"model_id": run, "seq_id": seq, "path": path, "optimizer": False, **fields}
    return await api.post("load_weights", body, key)


async def start(api: Api, path: str, number: int = 1, **fields: Any) -> httpx.Response:
    """Create a run from a checkpoint, in a new session unless one is given."""
    key = fields.pop("key", ALICE)
    if "session_id" not in fields:
        fields["session_id"] = (await api.post("create_session", {}, key)).json()["session_id"]
    body = {"model_seq_id": number, "path": path, "optimizer": True, **fields}
    return await api.post("load_weights", body, key)


def url_of(path: str, then: str = "") -> str:
    """Return the REST path of a checkpoint."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}{then}"


async def change(api: Api, method: str, path: str, then: str = "", **kwargs: Any) -> httpx.Response:
    """Send a request to one of the routes of a checkpoint."""
    headers = {"X-API-Key": kwargs.pop("key", ALICE)}
    return await api.http.request(method, url_of(path, then), headers=headers, **kwargs)


async def info(api: Api, path: str, key: str = ALICE) -> httpx.Response:
    """Request the description of a checkpoint."""
    return await api.post("weights_info", {"tinker_path": path}, key)


async def copy(api: Api, path: str, key: str = ALICE, **fields: Any) -> httpx.Response:
    """Copy a checkpoint, by default into a project."""
    headers = fields.pop("headers", {})
    if "session_id" not in fields:
        fields = {"destination_project_id": "archive", **fields}
    return await api.post("copy_weights", {"source_path": path, **fields}, key, headers=headers)


async def tenant_of(api: Api, key: str = ALICE) -> Any:
    """Return the tenant of a key."""
    return await api.services.tenants.authenticate(key)
