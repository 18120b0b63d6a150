"""Real containers of the compose file, under a project name of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
READY_S = 180.0

#: Additional compose file with the needs of a site (a build network, a mirror …).
OVERRIDE = "COMPOSE_OVERRIDE_FILE"


class Containers:
    """The four services, run with the same compose commands that an operator types."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        override = os.environ.get(OVERRIDE)
        files = ["--file", "docker-compose.yml", *(["--file", override] if override else [])]
        self._command = [*compose_command(), "--project-name", f"cotrain-test-{os.getpid()}", *files]
        # Only our variables: those of this shell belong to another server and are not tested.
        inherited = {n: v for n, v in os.environ.items() if not n.startswith("COTRAIN_")}
        publish = {"PUBLISH": f"127.0.0.1:{self._port}"}
        self._environment = inherited | publish | dict(variables)

    def compose(self, *arguments: str) -> str:
        """Run one compose command. Return its output; an error message includes the error output."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
        return done.stdout

    def run(self, service: str, *command: str) -> str:
        """Run a command inside a running container."""
        return self.compose("exec", "-T", service, *command)

    def kill(self, service: str) -> None:
        """Send SIGKILL to the container's process, so nothing is drained, flushed or printed."""
        self.compose("kill", "--signal", "SIGKILL", service)

    def start(self, service: str) -> None:
        """Start a stopped or killed container again, on its existing data."""
        self.compose("start", service)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return the engine's description of a service's container."""
        container = self.compose("ps", "--quiet", "--all", service).strip()
        told = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        facts: dict[str, Any] = json.loads(told.stdout)[0]
        return facts

    def wait_until_ready(self) -> None:
        """Wait until `/readyz` reports that the server is ready. Fail with its reasons and the logs."""
        deadline, reasons = time.monotonic() + READY_S, "nothing answered"
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as response:
                    if response.status == 200:
                        return
            except urllib.error.HTTPError as not_ready:
                reasons = not_ready.read().decode()
            except OSError as unreachable:
                reasons = str(unreachable)
            time.sleep(0.2)
        raise AssertionError(f"not ready: {reasons}\n{self.compose('logs', '--tail', '50')}")


def compose_command() -> list[str]:
    """Return `docker compose` if the engine has it, otherwise docker-compose 1.29."""
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker-compose"] if asked.returncode else ["docker", "compose"]
