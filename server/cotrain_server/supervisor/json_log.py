"""Log writer of a process: each printed line as one JSON object, time first. Standard library only.

Usage: `python -I -S json_log.py NAME < PIPE >> LOG`

Our processes write JSON themselves. Redis does not, nor do native libraries, nor a crashing
interpreter. It is a separate process, not a task of the supervisor. While the supervisor is
suspended (Ctrl-Z in its terminal), an unread pipe would block all other processes.
"""

import json
import os
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime

#: A longer line is split, because endless output must not fill the memory.
LONGEST_LINE = 1024**2
#: Redis log line: process, role, time, level, message. Its time is in the host's zone; ours is UTC.
_REDIS = re.compile(r"\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ ([.*#-]) (.*)")
_LEVELS = {".": "debug", "-": "info", "*": "info", "#": "warning"}


def as_json(line: str, process: str, now: datetime) -> str | None:
    """Return a printed line as JSON, or None for an empty one."""
    if not line.strip():
        return None
    if line.startswith('{"ts":'):
        return line
    redis = _REDIS.fullmatch(line)
    level, text = (_LEVELS[redis[1]], redis[2]) if redis else ("info", line)
    time = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return json.dumps({"ts": time, "level": level, "process": process, "event": text})


def main(process: str) -> None:
    """Copy until the last writer closes the pipe."""
    while line := sys.stdin.buffer.readline(LONGEST_LINE):
        written = as_json(line.decode(errors="replace").rstrip("\n"), process, datetime.now(UTC))
        if written is not None:
            with suppress(OSError):  # no disk space: the line is lost, but its process continues
                os.write(sys.stdout.fileno(), f"{written}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
