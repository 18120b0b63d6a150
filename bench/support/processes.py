"""Processes that a benchmark starts and that do not outlive it, however the benchmark ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from redis import ConnectionError as RedisConnectionError
from redis import Redis

from cotrain_server.supervisor.process import TETHER
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command

PATIENCE_S = 60.0
COTRAIN = Path(sys.executable).with_name("cotrain")
#: Part of the command line of each process of a server.
ROLES = {
    "redis": "redis-server", "parser": "cotrain_server.parser_child", "api": "-m cotrain_server",
    "scheduler": "-m cotrain_scheduler", "worker": "-m cotrain_workers",
}  # fmt: skip
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tethered(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command that becomes `command`, and is told to end when this process has (`kill -9` included)."""
    tether = [sys.executable, "-I", "-S", TETHER, os.getpid(), int(signal.SIGTERM)]
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
    socket = folder / "redis.sock"
    command = redis_command(find_redis_binary(), folder / "redis", socket, maxmemory=maxmemory)
    process = subprocess.Popen(tethered([*command, *flags]), stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE_S
    with Redis(unix_socket_path=str(socket)) as redis:
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


def cpu_s(pid: int | str = "self") -> float:
    """Return the processor time of a process so far, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def cpu_by_role() -> dict[str, float]:
    """Return the processor time in s of this process (client) and of each process of a server that it started."""
    took = {"client": cpu_s()}
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        for role, word in ROLES.items():
            if word in line:
                took[role] = took.get(role, 0.0) + cpu_s(process.pid)
                break
    return took
