"""Local server for load tests (Redis, scheduler, API, a null worker), and a minimal client of it.

Each part is a process of its own, as in `cotrain serve`, and ends with the server. Clients share two cores with it,
and a whole client library would measure itself. So a client sends one request at a time on a kept connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.load.null_worker import publish_pool
from bench.support.processes import cpu_s, start_redis
from cotrain.wire.proto import wire_pb2
from cotrain_store.disk.spool import Spool, new_writer

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / name) for name in ("client", "scheduler", "server", "workers", ".")]
ADMIN_KEY = "key-of-the-operator"
#: Statuses that SDKs repeat without a word to their user, as they do when a connection breaks.
REPEATED = (408, 429, 503)
RETRY_S = 0.05

Body = dict[str, Any] | bytes
Address = tuple[str, int]


@dataclass
class LocalServer:
    """Processes of one load test."""

    folder: Path
    listener: socket.socket
    running: dict[str, psutil.Process] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        """Address of the API, shared by all API processes."""
        host, port = self.listener.getsockname()
        return host, port

    @property
    def redis_url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time used so far in s by each process and its children; `client` is this one."""
        own = {name: (one, *one.children()) for name, one in self.running.items()}
        return {"client": cpu_s(), **{name: sum(cpu_s(each.pid) for each in some) for name, some in own.items()}}

    def rss_mb(self, name: str) -> float:
        return float(self.running[name].memory_info().rss / 2**20)

    def start(self, keys: Sequence[str], *worker: str, **settings: str) -> None:
        """Start an API process on the server's port, a scheduler, and a null worker with options."""
        descriptor = self.listener.fileno()
        os.set_inheritable(descriptor, True)
        given = {"API_KEYS": ",".join(keys), "ADMIN_KEY": ADMIN_KEY, **settings}
        self._start("api", ["cotrain_server", "--listen-fd", str(descriptor)], (descriptor,), **given)
        self._start("scheduler", ["cotrain_scheduler"])
        self._start("worker", ["bench.load.null_worker", *worker])

    def start_bare(self) -> None:
        """Start a bare application on the server's port, in place of all processes."""
        descriptor = self.listener.fileno()
        os.set_inheritable(descriptor, True)
        self._start("api", ["bench.load.bare_server", str(descriptor)], (descriptor,))

    def _start(self, name: str, module: Sequence[str], fds: Sequence[int] = (), **settings: str) -> None:
        given = {
            "REDIS_URL": self.redis_url, "DATA_DIR": str(self.folder / "data"), "DISK_RESERVE_BYTES": "0", **settings,
        }  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
        environment |= {f"COTRAIN_{key}": value for key, value in given.items()}
        command = [sys.executable, "-m", *module]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=fds)
        self.running[name] = psutil.Process(process.pid)


@contextlib.contextmanager
def local_server() -> Iterator[LocalServer]:
    """Yield a server with Redis and a pool in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="ctload-") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        server = LocalServer(Path(folder), listener)
        try:
            with (server.folder / "redis.log").open("ab") as log:
                server.running["redis"] = psutil.Process(start_redis(server.folder, log).pid)
            with contextlib.closing(Spool(server.folder / "data" / "spool", new_writer("bench"))) as spool:
                publish_pool(server.redis_url, spool)
            yield server
        finally:
            for one in server.running.values():
                one.kill()
                one.wait()


def keys_of(tenants: int) -> list[str]:
    return [f"tml-load-{number:012}" for number in range(tenants)]


class Dropped(Exception):
    """The connection ended before the response was complete."""


class Client:
    """One connection of one tenant; opened on use, and again after it was closed."""

    def __init__(self, address: Address, key: str) -> None:
        self._address, self._key = address, key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: Body, tail: bytes = b"") -> tuple[int, Body]:
        """POST JSON, or protobuf whose end may be in `tail`; return status and response. Raises Dropped."""
        payload, kind = (body, "x-protobuf") if isinstance(body, bytes) else (json.dumps(body).encode(), "json")
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {self._key}\r\n"
            f"accept: application/x-protobuf, application/json\r\n"
            f"content-type: application/{kind}\r\ncontent-length: {len(payload) + len(tail)}\r\n\r\n"
        )
        try:
            if self._streams and self._streams[0].at_eof():
                self.close()  # the server has closed it while no request was pending
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._address, limit=2**14)
            reader, writer = self._streams
            writer.write(head.encode() + payload)
            writer.write(tail)
            return await self._answer(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Dropped(repr(error)) from error

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
            self._streams = None

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, Body]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        payload = await reader.readexactly(length)
        if "connection: close" in head:
            self.close()
        return int(head.split(" ", 2)[1]), json.loads(payload) if "application/json" in head else payload


async def persist(client: Client, path: str, body: Body, seen: Counter[str], tail: bytes = b"") -> Any:
    """Send a request as SDKs do: again after a status that they repeat. Raises for any other but 200."""
    while True:
        try:
            status, answer = await client.post(path, body, tail)
        except Dropped:
            seen[f"{path} dropped"] += 1
            await asyncio.sleep(RETRY_S)
            continue
        seen[f"{path} {status}"] += 1
        if status == 200:
            return answer
        if status not in REPEATED:
            raise AssertionError(f"{path}: {status} {answer!r}")
        await asyncio.sleep(0 if status == 408 else RETRY_S)


async def new_run(client: Client, seen: Counter[str]) -> str:
    """Open a session and a run, whose creation is accepted but may be pending."""
    session = (await persist(client, "create_session", {}, seen))["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": "null", "lora_config": {"rank": 4}}
    run: str = (await persist(client, "create_model", lora, seen))["model_id"]
    return run


def pass_body(run: str, seq: int, tokens: int) -> bytes:
    """Return a forward_backward of one datum, encoded as by SDK 0.38."""
    request = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4 * tokens)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dtype, targets.dense = wire_pb2.DTYPE_INT64, bytes(8 * tokens)
    weights.dtype, weights.dense = wire_pb2.DTYPE_FLOAT32, bytes(4 * tokens)
    return request.SerializeToString()
