"""Ports for servers that are to come back where they were."""

from __future__ import annotations

import random
import socket

#: Below what Linux gives to connections: none takes the port while its server is away.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Find a port that nobody listens on, and that stays free until a test takes it."""
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no free port")
