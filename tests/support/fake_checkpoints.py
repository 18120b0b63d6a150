"""Minimal server of checkpoints: it stores uploads, and lists the given paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from typing_extensions import override

from tests.support.fake_api import FakeApi

LINKS = "https://files.example"


@dataclass
class FakeCheckpoints(FakeApi):
    """Server that resolves every save and load at once."""

    uploads: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """Query and body of every upload."""
    paths_stored: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of a download, by file name."""
    failures: dict[str, str] = field(default_factory=dict)
    """Request id → error message."""

    @override
    def _behave(self, endpoint: str, request: httpx.Request) -> httpx.Response:
        if request.url.host == httpx.URL(LINKS).host:
            return httpx.Response(200, content=self.files[request.url.path[1:]])
        handlers: dict[str, Callable[[httpx.Request], Any]] = {
            "training_runs": self._checkpoint,
            "checkpoints": self._list,
            "save_weights": lambda _: {"request_id": "save"},
            "load_weights": lambda _: {"request_id": "load"},
        }
        if request.method in ("DELETE", "PUT"):
            return httpx.Response(204)
        if endpoint in handlers:
            return httpx.Response(200, json=handlers[endpoint](request))
        if endpoint == "retrieve_future":
            return self._result(request)
        return super()._behave(endpoint, request)

    def _checkpoint(self, request: httpx.Request) -> Any:
        if request.method == "POST":
            query = dict(request.url.params)
            self.uploads.append((query, request.content))
            run = f"{query['session_id']}:train:{query['model_seq_id']}"
            return {
                "request_id": f"{run}:1",
                "import_request_id": f"{run}:0",
                "model_id": run,
                "path": f"tinker://{run}/weights/{query['name']}",
            }
        urls = {name: f"{LINKS}/{name}" for name in self.files}
        return {"urls": urls, "expires": "2030-01-01T00:00:00Z"}

    def _list(self, request: httpx.Request) -> Any:
        offset, limit = (int(request.url.params[name]) for name in ("offset", "limit"))
        return {
            "checkpoints": [_shown(path) for path in self.paths_stored[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(self.paths_stored)},
        }

    def _result(self, request: httpx.Request) -> httpx.Response:
        request_id = json.loads(request.content)["request_id"]
        if request_id in self.failures:
            failure = {"error": self.failures[request_id], "category": "user"}
            return httpx.Response(200, json=failure)
        results = {
            "save": {"path": "tinker://s1:train:0/weights/a"},
            "load": {"path": "tinker://x/weights/a", "model_id": "s1:train:0"},
        }
        if request_id in results:
            return httpx.Response(200, json=results[request_id])
        if request_id.endswith((":0", ":1")):  # an upload: its import and its save
            done = {"model_id": request_id[:-2]} if request_id.endswith(":0") else {"path": "tinker://"}
            return httpx.Response(200, json=done)
        return super()._behave("retrieve_future", request)


def _shown(path: str) -> dict[str, Any]:
    return {
        "checkpoint_id": path.partition("/weights/")[2],
        "checkpoint_type": "training",
        "time": "2026-01-02T03:04:05Z",
        "tinker_path": path,
        "size_bytes": 1000,
    }
