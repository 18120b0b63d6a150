"""A fake model hub that accepts uploads, for the command that pushes."""

from __future__ import annotations

import base64
import json
import threading
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override


class Hub:
    """Server for the requests that `huggingface_hub` sends while it uploads a folder.

    It keeps the files.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Committed files, by path in the repository."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @cached_property
    def address(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Answer a POST; a commit's files are kept."""
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": name, **mode} for name in names]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.address}/a/b/commit/{'0' * 40}", "commitOid": "0" * 40}
        return {"url": f"{self.address}/a/b", "id": "a/b", "errors": [], "warnings": []}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"type": "user", "name": "somebody", "auth": {}, "orgs": []})

        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._send(200, hub.answer(self.path, body))

        def _send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Suppress the log."""

    return Handler
