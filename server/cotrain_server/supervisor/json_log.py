"""Write a process's log: each line it printed as one JSON object, time first. Standard library only.

Usage: `python -I -S json_log.py NAME < PIPE >> LOG`

Our processes write JSON themselves. Redis does not, nor do libraries below Python, nor what ends an
interpreter. A process of its own and not a task of the supervisor: while that stands still (Ctrl-Z in its
terminal), a pipe that nothing reads would make everything else stand still.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime

#: More is the beginning of a line of its own: what prints without an end must not fill the memory.
LONGEST_LINE = 1024**2
#: Of Redis: process, role, when, how urgent, what. Its time is that of the host's zone; ours is UTC.
_REDIS = re.compile(r"\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ ([.*#-]) (.*)")
_LEVELS = {".": "debug", "-": "info", "*": "info", "#": "warning"}


def as_json(line: str, process: str, now: datetime) -> str | None:
    """Return a printed line as JSON; None for one that says nothing."""
    if not line.strip():
        return None
    if line.startswith('{"ts":'):
        return line
    redis = _REDIS.fullmatch(line)
    level, text = (_LEVELS[redis[1]], redis[2]) if redis else ("info", line)
    time = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return json.dumps({"ts": time, "level": level, "process": process, "event": text})


def main(process: str) -> None:
    """Copy until the last process that holds the other end is gone."""
    while line := sys.stdin.buffer.readline(LONGEST_LINE):
        written = as_json(line.decode(errors="replace").rstrip("\n"), process, datetime.now(UTC))
        if written is not None:
            with suppress(OSError):  # no disk: the line is lost, and its process goes on
                os.write(sys.stdout.fileno(), f"{written}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
