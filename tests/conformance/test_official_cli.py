"""Commands of the official CLI on a real server: each works, or reports at once the reason why not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from safetensors.numpy import load_file
from tinker.cli.__main__ import main_cli

from tests.conformance.cli_commands import KEY, REFUSED, SIGNED_IN, WORKS, Command
from tests.conformance.running import ROOT, Server
from tests.support.fake_hub import FakeHub
from tests.support.http_api import pass_body
from tests.warm.popen import run

HOUR = timedelta(hours=1)
#: Time limit of a whole list of commands; each command has its own limit.
PATIENCE_S = 3600


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    status: int
    out: str
    err: str


class Tenant:
    """Minimal plain HTTP client of one tenant, which creates objects to list."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def until_done(self, path: str, /, **body: Any) -> dict[str, Any]:
        """Queue a request and wait for its result."""
        request = self.post(path, **body)["request_id"]
        while True:
            answer = self._http.post("retrieve_future", json={"request_id": request})
            if answer.status_code != 408:
                result: dict[str, Any] = answer.json()
                assert "error" not in result, result
                return result

    def new_run(self, session: str, number: int, base_model: str) -> str:
        return str(
            self.until_done(
                "create_model",
                session_id=session,
                model_seq_id=number,
                base_model=base_model,
                lora_config={"rank": 4},
                user_metadata={"team": "red"},
            )["model_id"]
        )


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    """A model hub to push to."""
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def names(server: Server, hub: FakeHub) -> Mapping[str, str]:
    """Values of the placeholders in the commands."""
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{server.address}/api/v1", headers=headers, timeout=300) as http:
        return {**make_names(Tenant(http), server.base_model), "hub": hub.address}


def make_names(tenant: Tenant, base_model: str) -> Mapping[str, str]:
    """Train a little and save some checkpoints. Return their names."""
    session = tenant.post("create_session", project_id="nightly")["session_id"]
    run, other = (tenant.new_run(session, number, base_model) for number in (0, 1))
    tenant.until_done("forward_backward", **pass_body(run, 1))
    for seq, name in enumerate(("one", "two", "three"), 2):
        tenant.until_done("save_weights", model_id=run, seq_id=seq, path=name)
    tenant.until_done("save_weights_for_sampler", model_id=run, seq_id=5, path="sampled")
    tenant.until_done("save_weights_external", model_id=run, seq_id=6, path="plain")
    tenant.until_done("save_weights_for_sampler", model_id=other, seq_id=1, path="old")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    since, until = (at.isoformat().replace("+00:00", "Z") for at in (now - HOUR, now + 2 * HOUR))
    idle = tenant.post("create_session")["session_id"]
    token = tenant.post("auth/token")["jwt"]
    return {
        "run": run, "other": other, "session": session, "since": since, "until": until,
        "idle": idle, "token": token,
    }  # fmt: skip


def run_commands(
    server: Server, home: Path, names: Mapping[str, str], commands: Mapping[str, Command]
) -> dict[str, Outcome]:
    """Run commands one after the other with one home folder."""
    variables = {
        "HOME": str(home),
        "TINKER_BASE_URL": server.address,
        "TINKER_API_KEY": KEY,
        "COLUMNS": "400",  # because tables are cut to the width of the terminal
    }
    wanted = [
        {
            "argv": command.argv.format(**names).split(),
            "input": command.input,
            "env": {**variables, **{name: value.format(**names) for name, value in command.env.items()}},
        }
        for command in commands.values()
    ]
    done = run(
        [sys.executable, "-W", "ignore", "-m", "tests.conformance.cli_runner"],
        cwd=ROOT,
        input=json.dumps(wanted),
        timeout=PATIENCE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    return {name: Outcome(**row) for name, row in zip(commands, rows, strict=True)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the commands run and write."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def worked(server: Server, home: Path, names: Mapping[str, str]) -> dict[str, Outcome]:
    """Results of the commands that should succeed."""
    return run_commands(server, home, names, WORKS)


@pytest.fixture(scope="module")
def refused(server: Server, home: Path, names: Mapping[str, str], worked: dict[str, Outcome]) -> dict[str, Outcome]:
    """Results of the commands that should fail."""
    return run_commands(server, home, names, REFUSED)


@pytest.fixture(scope="module")
def signed_in(server: Server, tmp_path_factory: pytest.TempPathFactory, names: Mapping[str, str]) -> dict[str, Outcome]:
    """Results of the commands about a credential."""
    return run_commands(server, tmp_path_factory.mktemp("signed-in"), names, SIGNED_IN)


@pytest.mark.parametrize("name", WORKS)
def test_a_command_works(name: str, worked: dict[str, Outcome], names: Mapping[str, str]) -> None:
    outcome = worked[name]
    assert (outcome.status, "Traceback" in outcome.err) == (0, False), outcome
    for text in WORKS[name].says:
        assert text.format(**names) in outcome.out, outcome


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_that_cannot_work_reports_the_reason_at_once(name: str, refused: dict[str, Outcome]) -> None:
    outcome = refused[name]
    assert (outcome.status, "Traceback" in outcome.err) == (1, False), outcome
    for text in REFUSED[name].says:
        assert text in outcome.err, outcome


@pytest.mark.parametrize("name", SIGNED_IN)
def test_a_credential_is_saved_shown_and_removed(name: str, signed_in: dict[str, Outcome]) -> None:
    outcome = signed_in[name]
    assert (outcome.status, "Traceback" in outcome.err) == (0, False), outcome
    for text in SIGNED_IN[name].says:
        assert text in outcome.out, outcome


def test_every_command_of_the_cli_is_listed() -> None:
    tried = {
        " ".join(command.argv.removeprefix("-f json ").split()[:2])
        for commands in (WORKS, REFUSED, SIGNED_IN)
        for command in commands.values()
    }
    assert set(commands_of(main_cli)) == tried


@pytest.mark.parametrize("folder", ["plain", "trained"])
def test_the_download_is_an_adapter(folder: str, home: Path, worked: dict[str, Outcome]) -> None:
    (found,) = home.glob(f"{folder}/**/adapter_model.safetensors")
    assert json.loads(found.with_name("adapter_config.json").read_text())["r"] == 4
    assert {tensor.shape[0] for name, tensor in load_file(found).items() if "lora_A" in name} == {4}


def test_the_pushed_files_equal_the_downloaded_ones(
    hub: FakeHub, home: Path, worked: dict[str, Outcome], names: Mapping[str, str]
) -> None:
    (downloaded,) = home.glob("trained/**/adapter_model.safetensors")
    assert hub.files["adapter_model.safetensors"] == downloaded.read_bytes()
    assert json.loads(hub.files["adapter_config.json"])["r"] == 4
    assert f"tinker://{names['run']}/weights/one" in hub.files["README.md"].decode()


def test_a_downloaded_trace_shows_the_cycles_of_its_session(
    home: Path, worked: dict[str, Outcome], names: Mapping[str, str]
) -> None:
    events = json.loads((home / "own.pftrace").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {names["run"], names["other"]}
    assert any(event["name"] == "passes of all runs" for event in events)


def commands_of(group: click.Group, *names: str) -> Iterator[str]:
    """Yield every command of the CLI."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name)
        else:
            yield " ".join((*names, name))
