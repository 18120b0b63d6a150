"""Server of the demo and the examples: `cotrain serve` as a child process that is always stopped."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ADMIN_KEY = secrets.token_urlsafe(12)
"""Operator's key of the demo's server."""
READY = "cotrain ready at "
COTRAIN = Path(sys.executable).with_name("cotrain")
GIVE_WAY = "GOMP_SPINCOUNT", "10000"
"""Environment variable for torch in this process, set before its import as the server does for its
workers: waiting threads soon release their cores."""


@contextmanager
def serving(base_model: Path, api_keys: Sequence[str], *options: str, say: Callable[[str], None]) -> Iterator[str]:
    """Run a server and yield its address. Its storage is deleted afterwards.

    `say` is called with each line that the server prints until it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="cotrain-demo-") as data_dir:
        command = [
            str(COTRAIN),
            "serve",
            f"--base-model={base_model}",
            f"--data-dir={data_dir}",
            "--port=0",
            *(f"--api-key={key}" for key in api_keys),
            *options,
        ]
        # In a session of its own: Ctrl-C reaches only the demo, which stops the server once.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COTRAIN_ADMIN_KEY": ADMIN_KEY},
        ) as process:
            try:
                yield _address(process, say)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait()


def _address(process: subprocess.Popen[str], say: Callable[[str], None]) -> str:
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        say(line.rstrip())
        if READY in line:
            # Keep reading its output, or the server would block on a full pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return line.partition(READY)[2].strip()
    raise SystemExit("the server did not start:\n" + "".join(printed))
