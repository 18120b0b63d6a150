"""Real processes of ours, forked (`tests.warm`), to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.support.stack import MODEL
from tests.warm.popen import Popen, run
from tests.warm.sources import SOURCES

PATIENCE_S = 300
#: A worker that copies its runs out often.
WORKER = "cotrain_workers --snapshot-ops 4"


class Process:
    """One of our processes. `kill` is SIGKILL, `start` starts or restarts it. It ends with its block."""

    def __init__(self, module: str, settings: dict[str, str], log: Path) -> None:
        self._command = [sys.executable, "-m", *module.split()]
        self._environment = environment_of(settings)
        self._log = log
        self.start()

    def start(self) -> None:
        """Start or restart the process."""
        with self._log.open("a") as log:
            self._process = Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Send SIGKILL, so that nothing is cleaned up."""
        self._process.kill()
        assert self._process.wait(PATIENCE_S) == -signal.SIGKILL, self._log.read_text()

    def send(self, signum: signal.Signals) -> None:
        """Send a signal that it survives."""
        self._process.send_signal(signum)

    def await_kill(self) -> None:
        """Wait until a failpoint has killed it."""
        assert self._process.wait(PATIENCE_S) == -signal.SIGKILL, self._log.read_text()

    @property
    def is_stopped(self) -> bool:
        """True if the process is suspended (SIGSTOP)."""
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def await_end(self) -> None:
        """Wait until it has ended with status 0."""
        assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()

    def stop(self) -> None:
        """Send SIGTERM, after which it drains. A new process without a handler yet would be killed,
        so it gets the signal later.
        """
        while self._process.poll() is None and not catches(self._process.pid, signal.SIGTERM):
            time.sleep(0.01)
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()


def catches(pid: int, signum: signal.Signals) -> bool:
    """Return True if a process has its own handler for a signal, according to Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def ended(module: str, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a process that ends without a signal."""
    return run([sys.executable, "-m", module], env=environment_of(settings), timeout=PATIENCE_S)


def environment_of(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment of another process, with the path of our sources."""
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(SOURCES)}


def settings_of(url: str, data_dir: Path, model: Path) -> dict[str, str]:
    """Return a worker's settings. The scheduler reads a part of them."""
    return {
        "COTRAIN_REDIS_URL": url,
        "COTRAIN_DATA_DIR": str(data_dir),
        "COTRAIN_BASE_MODEL": f"{MODEL}={model}",
        "COTRAIN_TORCH_THREADS": "1",
        "COTRAIN_OFFLINE": "true",
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def scheduler_and_worker(settings: dict[str, str], folder: Path) -> Iterator[tuple[Process, Process]]:
    """Start a scheduler and a worker, with their logs in this folder."""
    shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
    with (
        Process("cotrain_scheduler", shared, folder / "scheduler.log") as scheduler,
        Process(WORKER, settings, folder / "worker.log") as worker,
    ):
        yield scheduler, worker
