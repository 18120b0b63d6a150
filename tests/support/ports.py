"""Ports for servers that restart on the same port."""

from __future__ import annotations

import random
import socket

#: Range below the ephemeral ports of Linux, so that no connection takes the port while its server is down.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port that is free, and stays free until a test uses it."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no free port")
