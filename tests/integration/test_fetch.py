"""Download of a base model by a separate process that then ends, so that the worker needs no hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from cotrain_workers.fetch import is_whole
from tests.support.local_server import Handler, LocalServer

MODEL = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class ReadableHub(LocalServer):
    """A Hugging Face hub that supports only the download of one model's small files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[str]()
        hub = self

        class Hub(Handler):
            @override
            def respond(self) -> None:
                hub.asked.append(self.path)
                if not self.path.startswith("/api/models/"):
                    self._send(hub.files[self.path.partition(f"/resolve/{COMMIT}/")[2]])
                elif MODEL not in self.path:
                    self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
                else:
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": f"{hash(content):x}"}
                        for name, content in hub.files.items()
                    ]
                    told = tree if "/tree/" in self.path else {"id": MODEL, "sha": COMMIT}
                    self._send(json.dumps(told).encode())

            def _send(self, body: bytes) -> None:
                self.answer(200, body, {"ETag": f'"{hash(body):x}"', "X-Repo-Commit": COMMIT})

        super().__init__(Hub)


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
        env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home)},
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
    hub.address = "http://127.0.0.1:9"
    told = fetch(hub, tmp_path, MODEL)
    assert told.returncode == 1
    assert told.stderr.startswith(f"{MODEL} could not be fetched: ")
    assert "Traceback" not in told.stderr
