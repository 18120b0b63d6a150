"""`cotrain serve` as a process of the demo's own, stopped in good order whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY = "cotrain ready at "
COTRAIN = Path(sys.executable).with_name("cotrain")
GIVE_WAY = "GOMP_SPINCOUNT", "10000"
"""For torch in this process, before it is loaded, what the server sets for its workers: threads that wait
soon give their cores to others."""


@contextmanager
def serving(
    base_model: Path, api_keys: Sequence[str], *options: str, say: Callable[[str], None]
) -> Iterator[str]:
    """Run a server and give its address. What it stores is gone afterwards.

    `say` hears each line that the server prints until it is ready.
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
        # A session of its own: Ctrl-C reaches the demo, and the demo tells the server, once.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
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
            # Its lines must be read on, or a talkative server would stop in mid-sentence.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return line.partition(READY)[2].strip()
    raise SystemExit("the server did not start:\n" + "".join(printed))
