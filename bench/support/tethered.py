"""A process that a benchmark starts and that does not outlive it, however the benchmark ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from cotrain_server.supervisor.process import TETHER


def tethered(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command that becomes `command`, and is told to end when this process has (`kill -9` included)."""
    tether = [sys.executable, "-I", "-S", TETHER, os.getpid(), int(signal.SIGTERM)]
    return [str(part) for part in (*tether, *command)]
