"""HAProxy with the configuration of the compose file, in front of a server that is already running."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from bench.support.processes import PATIENCE_S, running

CONFIG = Path(__file__).parents[2] / "docker" / "edge" / "haproxy.cfg"


def find_haproxy() -> str | None:
    """Return the path of HAProxy, or None if it is not installed. Debian has it in /usr/sbin."""
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def edge(address: str, **variables: object) -> Iterator[str]:
    """Run HAProxy in front of the API at `address`; yield its URL. `variables` are its `EDGE_*`.

    Raises:
        RuntimeError: HAProxy is not installed, or did not start.
    """
    haproxy = find_haproxy()
    if haproxy is None:
        raise RuntimeError("haproxy is not installed: apt-get install haproxy")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    given = {"EDGE_API": urlsplit(address).netloc, "EDGE_LISTEN": f"127.0.0.1:{port}"}
    environment = {**os.environ, **given, **{name: str(value) for name, value in variables.items()}}
    with running([haproxy, "-db", "-f", CONFIG], env=environment) as process:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                yield f"http://127.0.0.1:{port}"
                return
            time.sleep(0.05)
        raise RuntimeError(f"haproxy ended with status {process.poll()}")
