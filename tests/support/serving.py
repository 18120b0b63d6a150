"""`cotrain serve` as an operator runs it, on a free port, with all its processes forked (`tests.warm`) or not."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.warm.popen import Popen
from tests.warm.sources import COMMAND

READY = "cotrain ready at "
PATIENCE_S = 300


class Serving:
    """Running server, stopped cleanly at the end of its block.

    `options` are further command line options, and `settings` are `COTRAIN_*` variables by their
    full name. With `by_interpreter`, every process is started as an operator's, without a fork.
    """

    def __init__(
        self,
        data_dir: Path,
        base_models: Sequence[str],
        api_keys: Sequence[str],
        options: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        *,
        by_interpreter: bool = False,
    ) -> None:
        self._popen = subprocess.Popen if by_interpreter else Popen
        self._data_dir = data_dir
        self._command = [
            str(COMMAND),
            "serve",
            "--port=0",
            f"--data-dir={data_dir}",
            "--torch-threads=1",
            *(f"--base-model={name}" for name in base_models),
            *(f"--api-key={key}" for key in api_keys),
            *options,
        ]
        self._environment = {**os.environ, **(settings or {}), "PYTHONUNBUFFERED": "1"}
        self._lines: list[str] = []
        self._is_ready = threading.Event()
        self.address = ""

    def __enter__(self) -> Self:
        self._process = self._popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready.wait(PATIENCE_S)
        if not self.address:
            self.stop()
            raise RuntimeError("cotrain serve did not start:\n" + self.log)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """Output of the server."""
        return "".join(self._lines)

    @property
    def operator(self) -> dict[str, str]:
        """Header with the admin key for `/metrics` and the whole of `/status`."""
        return {"X-API-Key": (self._data_dir / "admin-key").read_text().strip()}

    def stop(self) -> int:
        """Send Ctrl-C and wait. Return the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        status = self._process.wait(PATIENCE_S)
        self._reader.join()
        if self._process.stdout:
            self._process.stdout.close()
        return status

    def kill(self) -> None:
        """Send SIGKILL to every process at once, so that nothing is drained, flushed or printed."""
        started = [int(pid) for pid in re.findall(r"started \(pid (\d+)\)", self.log)]
        deaths = []
        for pid in (self._process.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                deaths.append(os.pidfd_open(pid))
                os.kill(pid, signal.SIGKILL)
        for death in deaths:
            select.select([death], [], [], PATIENCE_S)
            os.close(death)
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if READY in line:
                self.address = line.partition(READY)[2].strip()
                self._is_ready.set()
        self._is_ready.set()  # ended before it was ready
