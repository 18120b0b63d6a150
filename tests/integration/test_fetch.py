"""Download of a base model by a separate process that then ends, so that the worker needs no hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from typing_extensions import override

from cotrain_workers.fetch import is_whole

MODEL = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class ReadableHub:
    """A Hugging Face hub that supports only the download of one model's small files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._file(with_body=False)

            def do_GET(self) -> None:
                if self.path.startswith("/api/models/"):
                    self._model()
                else:
                    self._file(with_body=True)

            def _model(self) -> None:
                hub.asked.append(self.path)
                if MODEL not in self.path:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": f"{hash(content):x}"}
                    for name, content in hub.files.items()
                ]
                told = tree if "/tree/" in self.path else {"id": MODEL, "sha": COMMIT}
                self._answer(json.dumps(told).encode())

            def _file(self, *, with_body: bool) -> None:
                hub.asked.append(self.path)
                content = hub.files[self.path.partition(f"/resolve/{COMMIT}/")[2]]
                self._answer(content, with_body=with_body)

            def _answer(self, body: bytes, *, with_body: bool = True) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hash(body):x}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            @override
            def log_message(self, *_: object) -> None:
                """Suppress the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hub() -> Iterator[ReadableHub]:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        "one.safetensors": b"1",
        "two.safetensors": b"2",
        "pytorch_model.bin": b"never asked for",
    }
    with ReadableHub(files) as hub:
        yield hub


def fetch(hub: ReadableHub, home: Path, model: str) -> subprocess.CompletedProcess[str]:
    """Run the fetch as the container does."""
    return subprocess.run(
        [sys.executable, "-m", "cotrain_workers.fetch", model],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_model_is_fetched_once_and_complete_without_a_hub(hub: ReadableHub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path, f"mine={MODEL}")
    assert (first.returncode, first.stdout) == (0, f"{MODEL} is fetched.\n"), first.stderr
    assert not any(path.endswith(".bin") for path in hub.asked)
    (folder,) = tmp_path.glob(f"hub/models--*/snapshots/{COMMIT}")
    assert is_whole(folder)
    hub.asked.clear()
    second = fetch(hub, tmp_path, MODEL)
    assert second.stdout == f"{MODEL} is in the cache: nothing is fetched.\n"
    assert hub.asked == []


def test_missing_files_are_fetched(hub: ReadableHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, MODEL)
    (torn,) = tmp_path.glob(f"hub/models--*/snapshots/{COMMIT}/two.safetensors")
    torn.resolve().unlink()
    torn.unlink()
    assert not is_whole(torn.parent)
    assert fetch(hub, tmp_path, MODEL).stdout == f"{MODEL} is fetched.\n"
    assert is_whole(torn.parent)


def test_a_local_folder_is_not_requested_from_the_hub(hub: ReadableHub, tmp_path: Path) -> None:
    told = fetch(hub, tmp_path, f"mine={tmp_path}")
    assert told.stdout == f"{tmp_path} is a folder: nothing to fetch.\n"
    assert hub.asked == []


def test_a_missing_model_is_reported_in_a_sentence(hub: ReadableHub, tmp_path: Path) -> None:
    told = fetch(hub, tmp_path, "somebody/else")
    assert told.returncode == 1
    assert told.stderr == ("There is no model somebody/else on the hub, or it needs a token (HF_TOKEN).\n")


def test_a_model_without_safetensors_is_reported_in_a_sentence(hub: ReadableHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickled"}
    told = fetch(hub, tmp_path, MODEL)
    assert told.returncode == 1
    assert "has no weights in safetensors" in told.stderr


def test_an_unreachable_hub_is_reported_in_a_sentence(hub: ReadableHub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    told = fetch(hub, tmp_path, MODEL)
    assert told.returncode == 1
    assert told.stderr.startswith(f"{MODEL} could not be fetched: ")
    assert "Traceback" not in told.stderr
