"""Processes that a benchmark starts and that do not outlive it, however the benchmark ends: Redis, HAProxy, a server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
from redis import ConnectionError as RedisConnectionError
from redis import Redis

from cotrain_server.supervisor.process import EXEC_WITH_PARENT
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command

PATIENCE_S = 60.0
COTRAIN = Path(sys.executable).with_name("cotrain")
#: Configuration of HAProxy, that of the compose file.
CONFIG = Path(__file__).parents[2] / "docker" / "edge" / "haproxy.cfg"
#: Part of the command line of each process of a server.
ROLES = {
    "redis": "redis-server", "parser": "cotrain_server.parser_child", "api": "-m cotrain_server",
    "scheduler": "-m cotrain_scheduler", "worker": "-m cotrain_workers",
}  # fmt: skip
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tethered(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command that becomes `command` and receives SIGTERM when this process has ended (`kill -9` included)."""
    tether = [sys.executable, "-I", "-S", EXEC_WITH_PARENT, os.getpid(), int(signal.SIGTERM)]
    return [str(part) for part in (*tether, *command)]


@contextlib.contextmanager
def running(command: Sequence[str | os.PathLike[str]], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command, and stop it at the end of the block."""
    process = subprocess.Popen(tethered(command), text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def start_redis(folder: Path, log: IO[bytes] | int, *flags: str, maxmemory: str = "2gb") -> subprocess.Popen[bytes]:
    """Start a Redis on `folder/redis.sock`, and wait until it responds.

    Raises:
        RuntimeError: it did not respond within PATIENCE_S.
    """
    (folder / "redis").mkdir(exist_ok=True)
    path = folder / "redis.sock"
    command = redis_command(find_redis_binary(), folder / "redis", path, maxmemory=maxmemory)
    process = subprocess.Popen(tethered([*command, *flags]), stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE_S
    with Redis(unix_socket_path=str(path)) as redis:
        while time.monotonic() < deadline:
            with contextlib.suppress(RedisConnectionError):
                redis.ping()
                return process
            time.sleep(0.01)
    raise RuntimeError("Redis did not come up")


@contextlib.contextmanager
def a_redis(folder: Path, *flags: str, maxmemory: str = "2gb") -> Iterator[tuple[str, int]]:
    """Run a Redis; yield its address and process id."""
    process = start_redis(folder, subprocess.DEVNULL, *flags, maxmemory=maxmemory)
    try:
        yield f"unix://{folder}/redis.sock", process.pid
    finally:
        process.kill()
        process.wait()


def find_haproxy() -> str | None:
    """Return the path of HAProxy, or None if it is not installed. Debian has it in /usr/sbin."""
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextlib.contextmanager
def edge(address: str, **variables: object) -> Iterator[str]:
    """Run HAProxy in front of the API at `address`; yield its URL. `variables` are its `EDGE_*`.

    Raises:
        RuntimeError: HAProxy is not installed, or did not start.
    """
    haproxy = find_haproxy()
    if haproxy is None:
        raise RuntimeError("haproxy is not installed: apt-get install haproxy")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    given = {"EDGE_API": urlsplit(address).netloc, "EDGE_LISTEN": f"127.0.0.1:{port}"}
    environment = {**os.environ, **given, **{name: str(value) for name, value in variables.items()}}
    with running([haproxy, "-db", "-f", CONFIG], env=environment) as process:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                yield f"http://127.0.0.1:{port}"
                return
            time.sleep(0.05)
        raise RuntimeError(f"haproxy ended with status {process.poll()}")


def cpu_s(pid: int | str = "self") -> float:
    """Return the processor time of a process so far, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def cpu_by_role(server: int | None = None) -> dict[str, float]:
    """Return the processor time in s of this process (client) and of each process of a server, or of all, it started."""
    took = {"client": cpu_s()}
    for process in psutil.Process(server).children(recursive=True):
        line = " ".join(process.cmdline())
        if role := next((role for role, word in ROLES.items() if word in line), None):
            took[role] = took.get(role, 0.0) + cpu_s(process.pid)
    return took
