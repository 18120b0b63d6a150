"""Minimal Hugging Face hub that stores uploaded folders of small files.

It refuses every download, by the name of the repository, or because the file is missing.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

REPOSITORY = "somebody/adapter"
REFUSALS = {"absent": (401, "RepoNotFound"), "gated": (403, "GatedRepo")}


class FakeHub:
    """Running hub. `files` has the committed files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"name": "somebody", "type": "user", "orgs": [], "auth": {}})

            def do_HEAD(self) -> None:
                status, code = REFUSALS.get(self.path.split("/")[2], (404, "EntryNotFound"))
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(hub.answer(self.path, body))

            def _answer(self, answer: dict[str, Any]) -> None:
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            @override
            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
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
