"""Acceptance test of the compose file: built, used through the official SDK, killed, restarted.

Needs a container engine; run by `make test-compose`. All tests share one server and run in the
order of its lifetime.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.ports import free_port
from tests.support.tiny_models import build_tiny_qwen3

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

TRAINER = Path(__file__).with_name("trainer.py")
ALICE = "tml-alice_a-key-that-the-operator-chose"
STEPS = 10

#: Loss and gradient norm of one step.
Numbers = tuple[float, float]


class Trainer:
    """A run that the official SDK trains in a separate process (trainer.py)."""

    def __init__(self, containers: Containers, key: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, TRAINER, containers.url, key],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, index: int) -> None:
        """Send both requests of a step without waiting for the results."""
        assert self._ask(f"begin {index}") == "sent"

    def finish(self) -> Numbers:
        """Wait for the oldest step in flight."""
        loss, grad_norm = json.loads(self._ask("finish"))
        return loss, grad_norm

    def step(self, index: int) -> Numbers:
        self.begin(index)
        return self.finish()

    def _ask(self, line: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def train(containers: Containers, key: str) -> list[Numbers]:
    """Train a new run without faults, on the same data as every run here."""
    with Trainer(containers, key) as run:
        return [run.step(index) for index in range(STEPS)]


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    models = tmp_path_factory.mktemp("models")
    build_tiny_qwen3(models / "tiny")
    # The container runs as another user; pytest's folders and safetensors' files are private.
    for path in (models, *models.parents[:2], *models.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    variables = {
        "MODEL_DIR": str(models),
        "COTRAIN_BASE_MODEL": "tiny=/models/tiny",
        "COTRAIN_API_KEYS": ALICE,
        "COTRAIN_TORCH_THREADS": "1",
    }
    server = Containers(variables)
    try:
        server.compose("build")
        server.compose("up", "--detach")
        server.wait_until_ready()
        yield server
    finally:
        server.compose("down", "--volumes")


@pytest.fixture(scope="module")
def undisturbed(containers: Containers) -> list[Numbers]:
    """Losses and gradient norms of a training without faults."""
    return train(containers, ALICE)


def test_training_learns(undisturbed: list[Numbers]) -> None:
    assert undisturbed[-1][0] < undisturbed[0][0]


def test_a_run_survives_killed_containers_with_identical_numbers(
    containers: Containers, undisturbed: list[Numbers]
) -> None:
    steps = iter(range(STEPS))
    with Trainer(containers, ALICE) as run:
        seen = [run.step(next(steps))]
        for service in ("worker", "redis", "scheduler", "api"):
            run.begin(next(steps))
            containers.kill(service)
            run.begin(next(steps))  # while the container is down
            containers.start(service)
            seen += [run.finish(), run.finish()]
        containers.compose("restart", "api", "redis")
        seen += [run.step(index) for index in steps]
    assert seen == undisturbed


def test_a_key_made_in_the_container_belongs_to_a_new_tenant(
    containers: Containers, undisturbed: list[Numbers]
) -> None:
    printed = containers.run("api", "cotrain", "keys", "create", "bob")
    (key,) = re.findall(r"tml-\S+", printed)
    assert train(containers, key) == undisturbed


def test_compose_accepts_the_gpu_file_on_top(containers: Containers) -> None:
    told = containers.compose("--file", "docker-compose.gpu.yml", "config")
    assert "cotrain-worker-cuda" in told
    assert "nvidia" in told


def test_the_server_image_has_no_torch(containers: Containers) -> None:
    search = "import importlib.util as u; print(u.find_spec('torch'))"
    assert containers.run("api", "python", "-c", search).strip() == "None"


@pytest.mark.parametrize("service", ["api", "scheduler", "worker"])
def test_a_process_is_not_root_and_writes_only_to_its_folders(containers: Containers, service: str) -> None:
    attempt = (
        "import os, pathlib; print(os.getuid(), os.access('/opt/cotrain', os.W_OK), "
        "os.access('/data', os.W_OK)); pathlib.Path('/opt/cotrain/x').write_text('')"
    )
    told = containers.run(service, "sh", "-c", f'python -c "{attempt}" 2>&1 || true')
    assert told.startswith("10001 False True")
    assert "Read-only file system" in told


def test_the_user_of_redis_is_not_root_either(containers: Containers) -> None:
    told = containers.run("redis", "sh", "-c", "id -u; touch /etc/cotrain/x 2>&1 || true")
    assert told.startswith("10001\n")
    assert "Read-only file system" in told


def test_redis_requires_its_password(containers: Containers) -> None:
    ask = "$(command -v valkey-cli || command -v redis-cli) get cotrain:schema"
    assert "NOAUTH" in containers.run("redis", "sh", "-c", ask)
    known = f"REDISCLI_AUTH=$(cat /secret/redis-password) {ask}"
    assert containers.run("redis", "sh", "-c", known).strip().isdigit()


@pytest.mark.parametrize("service", ["api", "scheduler", "worker", "redis"])
def test_no_process_list_shows_the_password(containers: Containers, service: str) -> None:
    password = containers.run(service, "cat", "/secret/redis-password").strip()
    assert len(password) == 48
    assert password not in json.dumps(containers.inspect(service))
    assert password not in containers.run(service, "sh", "-c", "cat /proc/[0-9]*/cmdline")
    attempt = "touch /secret/x 2>&1 || true"
    if service != "redis":
        assert "Read-only file system" in containers.run(service, "sh", "-c", attempt)


@pytest.mark.parametrize("service", ["api", "scheduler", "worker", "redis"])
def test_a_container_has_its_resource_limits(containers: Containers, service: str) -> None:
    limits = containers.inspect(service)["HostConfig"]
    assert limits["Memory"] >= 2**30
    assert 0 < limits["PidsLimit"] <= 4096


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_internal_processes_cannot_reach_the_internet(containers: Containers, service: str) -> None:
    networks = containers.inspect("api")["NetworkSettings"]["Networks"]
    outside = next(net["IPAddress"] for name, net in networks.items() if name.endswith("_default"))
    attempt = (
        "import socket; s = socket.socket(); s.settimeout(5);"
        f"print(s.connect_ex(('{outside}', 8000)), s.close());"
        "print(socket.create_connection(('api', 8000), 60).close())"
    )
    from_outside = containers.compose(
        "run", "--rm", "-T", "--no-deps", "model", "python", "-c", attempt.partition(";print(socket")[0]
    )
    assert from_outside.split() == ["0", "None"]
    errno, *reached = containers.run(service, "python", "-c", attempt).split()
    assert errno != "0"
    assert reached == ["None", "None"]  # the same API, on the internal network


def test_the_threads_of_a_server_are_few(containers: Containers) -> None:
    told = containers.run("api", "sh", "-c", "env; grep Threads /proc/1/status")
    assert "OPENBLAS_NUM_THREADS=1\n" in told
    (threads,) = re.findall(r"Threads:\s+(\d+)", told)
    assert int(threads) <= 64


@pytest.mark.parametrize("service", ["api", "scheduler", "worker", "redis"])
def test_a_serving_container_is_not_reported_unhealthy(containers: Containers, service: str) -> None:
    state = containers.inspect(service)["State"]
    assert state["Running"]
    assert state.get("Health", {}).get("Status") != "unhealthy"


def test_a_stop_drains_and_every_process_exits_cleanly(containers: Containers) -> None:
    containers.compose("stop")
    ends = {
        service: containers.inspect(service)["State"]["ExitCode"] for service in ("api", "scheduler", "worker", "redis")
    }
    assert ends == dict.fromkeys(ends, 0)


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
