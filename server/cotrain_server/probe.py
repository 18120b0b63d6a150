"""Health of a server: its probe over HTTP, and the file of its failing processes.

The probe is for health checks of containers, so it imports the standard library only and starts quickly. Usage:
`python -m cotrain_server.probe http://127.0.0.1:8000/healthz`; exits 0 on HTTP 200, else 1.
"""

import json
import sys
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 2.0
#: File in the data folder, which the supervisor writes and the API reads.
FILE = "troubles.json"


def probe(url: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of a GET to an http:// address, or status 0 without an answer."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def read_problems(data_dir: Path) -> list[str]:
    """Return the supervisor's failing processes; empty without a supervisor or failures."""
    try:
        problems: dict[str, str] = json.loads((data_dir / FILE).read_text())
    except FileNotFoundError:
        return []
    return [f"{process}: {problem}" for process, problem in sorted(problems.items())]


def write_problems(data_dir: Path, problems: dict[str, str]) -> None:
    """Write the failing processes and their problems."""
    partial = data_dir / f"{FILE}.tmp"
    # On a full disk Redis crashes repeatedly, but its supervisor must not: `/readyz` reports both.
    with suppress(OSError):
        partial.write_text(json.dumps(problems))
        partial.replace(data_dir / FILE)


def main(arguments: list[str]) -> int:
    """Probe one address, and print the answer unless it is healthy."""
    status, body = probe(arguments[0])
    if status != 200:
        sys.stderr.write(f"{status} {body.decode(errors='replace')}\n")
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
