"""Local server for load tests: a real Redis, a real scheduler, API processes behind one port, a null worker.

Each is a process of its own, as in `cotrain serve`, and ends with the server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.load.null_worker import publish_pool
from bench.support.processes import PATIENCE_S, cpu_s, start_redis
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.redis_client.connection import SyncConnection, open_sync_connection

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / name) for name in ("client", "scheduler", "server", "workers", ".")]
ADMIN_KEY = "key-of-the-operator"


@dataclass
class Running:
    """One process of the server."""

    process: subprocess.Popen[bytes]

    @property
    def rss_mb(self) -> float:
        """Resident memory in MB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    @property
    def cpu_s(self) -> float:
        """Processor time used so far in s, with that of its child processes."""
        children = psutil.Process(self.process.pid).children()
        return sum(cpu_s(pid) for pid in (self.process.pid, *(child.pid for child in children)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> float:
        """Send SIGTERM; return the seconds until the process ended."""
        began = time.monotonic()
        self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        assert status == 0, f"{self.process.args!r} ended with {status}"
        return time.monotonic() - began


@dataclass
class LocalServer:
    """Processes of one load test."""

    folder: Path
    listener: socket.socket
    running: dict[str, Running] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Address of the API, shared by all API processes."""
        host, port = self.listener.getsockname()
        return host, port

    @property
    def redis_url(self) -> str:
        """Address of Redis."""
        return f"unix://{self.folder}/redis.sock"

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time used so far by each process in s; `client` is this one."""
        return {"client": cpu_s(), **{name: one.cpu_s for name, one in self.running.items()}}

    def start_redis(self) -> None:
        """Start or restart Redis with the flags of `cotrain serve`."""
        with (self.folder / "redis.log").open("ab") as log:
            self.running["redis"] = Running(start_redis(self.folder, log))

    def start(self, keys: Sequence[str], *worker: str, long_poll_s: float = 25.0, **settings: str) -> None:
        """Start an API process, a scheduler, and a null worker with options."""
        self.start_api(keys, long_poll_s=long_poll_s, **settings)
        self.start_scheduler()
        self.start_worker(*worker)

    def start_scheduler(self) -> None:
        self._start("scheduler", ["cotrain_scheduler"])

    def start_worker(self, *options: str) -> None:
        self._start("worker", ["bench.load.null_worker", *options])

    def start_api(
        self, keys: Sequence[str], name: str = "api", *, long_poll_s: float = 25.0, **settings: str
    ) -> Running:
        """Start an API process on the server's port."""
        descriptor = self.listener.fileno()
        os.set_inheritable(descriptor, True)
        options = ["--listen-fd", str(descriptor), "--long-poll-s", str(long_poll_s)]
        given = {"API_KEYS": ",".join(keys), "ADMIN_KEY": ADMIN_KEY, **settings}
        return self._start(name, ["cotrain_server", *options], (descriptor,), **given)

    @contextlib.contextmanager
    def connected(self) -> Iterator[SyncConnection]:
        """Yield a direct connection to Redis."""
        with contextlib.closing(open_sync_connection(self.redis_url)) as connection:
            yield connection

    def _start(self, name: str, module: Sequence[str], fds: Sequence[int] = (), **settings: str) -> Running:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(SOURCES),
            "COTRAIN_REDIS_URL": self.redis_url,
            "COTRAIN_DATA_DIR": str(self.folder / "data"),
            "COTRAIN_DISK_RESERVE_BYTES": "0",
            **{f"COTRAIN_{key}": value for key, value in settings.items()},
        }
        command = [sys.executable, "-m", *module]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=fds)
        self.running[name] = Running(process)
        return self.running[name]


@contextlib.contextmanager
def local_server() -> Iterator[LocalServer]:
    """Yield a server with Redis and a pool in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="ctload-") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        server = LocalServer(Path(folder), listener)
        try:
            server.start_redis()
            with contextlib.closing(Spool(server.folder / "data" / "spool", new_writer("bench"))) as spool:
                publish_pool(server.redis_url, spool)
            yield server
        finally:
            for one in server.running.values():
                one.kill()


def keys_of(tenants: int) -> list[str]:
    """Return an API key for each tenant."""
    return [f"tml-load-{number:012}" for number in range(tenants)]
