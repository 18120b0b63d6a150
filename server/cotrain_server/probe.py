"""Health probe of a server, for container health checks. Standard library only, for a quick start.

Usage: `python -m cotrain_server.probe http://127.0.0.1:8000/healthz`; exits 0 on HTTP 200, else 1.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 2.0


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


def main(arguments: list[str]) -> int:
    """Probe one address, and print the answer unless it is healthy."""
    status, body = probe(arguments[0])
    if status != 200:
        sys.stderr.write(f"{status} {body.decode(errors='replace')}\n")
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
