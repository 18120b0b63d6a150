"""Minimal Hugging Face hub that stores uploaded folders of small files.

It refuses every download, by the name of the repository, or because the file is missing.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from typing_extensions import override

from tests.support.local_server import Handler, LocalServer

SOMEBODY: dict[str, Any] = {"name": "somebody", "type": "user", "orgs": [], "auth": {}}
REPOSITORY = "somebody/adapter"
REFUSALS = {"absent": (401, "RepoNotFound"), "gated": (403, "GatedRepo")}


class FakeHub(LocalServer):
    """Running hub. `files` has the committed files, by their path in the repository."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        hub = self

        class Hub(Handler):
            @override
            def respond(self) -> None:
                if self.command == "HEAD":
                    status, code = REFUSALS.get(self.path.split("/")[2], (404, "EntryNotFound"))
                    self.answer(status, headers={"X-Error-Code": code})
                    return
                answer = hub.answer_to(self.path, self.body()) if self.command == "POST" else SOMEBODY
                self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        super().__init__(Hub)

    def answer_to(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a POST. Files of a commit are stored."""
        if path.startswith("/api/repos/create"):
            return {"url": f"{self.address}/{REPOSITORY}"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = line["value"]
                    self.files[file["path"]] = base64.b64decode(file["content"])
            return {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.address}/{REPOSITORY}/commit/{'0' * 40}",
            }
        return {"errors": [], "warnings": []}
