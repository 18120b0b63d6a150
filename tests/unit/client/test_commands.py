from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cotrain import ServiceClient
from cotrain.cli import command_line
from cotrain.commands import terminal
from tests.support.fake_api import refusal
from tests.support.fake_checkpoints import FakeCheckpoints

PATH = "tinker://s1:train:0/weights/mine"
URL = "training_runs/s1:train:0/checkpoints/weights/mine"
NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeCheckpoints:
    fake = FakeCheckpoints()
    monkeypatch.setenv("COTRAIN_API_KEY", "tml-key")
    monkeypatch.setattr(terminal, "ServiceClient", lambda policy: ServiceClient(network=fake.network, policy=policy))
    return fake


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(command_line([]), arguments, **options)


def test_an_upload_prints_the_path(api: FakeCheckpoints, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    given = (str(tmp_path), "--base-model", "m", "--name", "mine", "--ttl-seconds", "3600")
    done = run("upload", *given)
    assert (done.exit_code, done.stdout) == (0, f"{PATH}\n")
    assert api.uploads[0][0]["ttl_seconds"] == "3600"


def test_a_list_shows_whole_paths_and_no_emoji(api: FakeCheckpoints) -> None:
    api.paths_stored = [f"tinker://{'x' * 90}:train:0/weights/:train:[bold]"]
    done = run("checkpoints", "list")
    assert done.exit_code == 0
    assert api.paths_stored[0] in done.stdout
    assert "1.0 kB" in done.stdout
    assert "2026-01-02 03:04" in done.stdout
    assert "never" in done.stdout
    assert "\x1b" not in done.stdout


#: Control codes: set a terminal's title, clear it, colour it and reverse the direction of its text.
SPELL = "\x1b]0;mine\x07\x1b[2J\x9b31m\N{RIGHT-TO-LEFT OVERRIDE}"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_control_characters_in_a_list_are_not_printed(api: FakeCheckpoints, options: list[str]) -> None:
    api.paths_stored = [f"tinker://s1:train:0/weights/{SPELL}my\N{IDEOGRAPHIC SPACE}own"]
    done = run("checkpoints", "list", *options)
    assert done.exit_code == 0
    assert "my\N{IDEOGRAPHIC SPACE}own" in done.stdout
    assert not set(done.stdout) & set("\x1b\x07\x9b\N{RIGHT-TO-LEFT OVERRIDE}")
    if options:
        assert json.loads(done.stdout)[0]["tinker_path"] == api.paths_stored[0]


def test_control_characters_in_a_refusal_are_not_printed(api: FakeCheckpoints) -> None:
    api.answers["get_server_capabilities"] = [refusal(404, SPELL)]
    done = run("models")
    assert (done.exit_code, "31m" in done.stderr) == (1, True)
    assert not set(done.stderr) & set("\x1b\x07\x9b\N{RIGHT-TO-LEFT OVERRIDE}")


def test_a_list_as_json_has_the_fields_of_the_wire(api: FakeCheckpoints) -> None:
    api.paths_stored = [PATH]
    [listed] = json.loads(run("checkpoints", "list", "--json").stdout)
    assert listed["tinker_path"] == PATH
    assert listed["time"] == "2026-01-02T03:04:05Z"
    assert (listed["size_bytes"], listed["expires_at"]) == (1000, None)


def test_a_download_is_written_to_the_given_path(api: FakeCheckpoints, tmp_path: Path) -> None:
    api.files = {"adapter_config.json": b"{}"}
    done = run("download", PATH, "--output", str(tmp_path / "in"), "--json")
    assert (tmp_path / "in" / "adapter_config.json").read_bytes() == b"{}"
    assert json.loads(done.stdout) == {
        "tinker_path": PATH,
        "folder": str(tmp_path / "in"),
        "files": ["adapter_config.json"],
    }


def test_several_checkpoints_are_deleted_in_one_call(api: FakeCheckpoints) -> None:
    done = run("checkpoints", "delete", PATH, f"{PATH}2")
    assert done.stdout == f"deleted {PATH}\ndeleted {PATH}2\n"
    assert [call.method for call in api.calls] == ["DELETE", "DELETE"]


@pytest.mark.parametrize(
    ("time", "seconds"), [("3600", 3600), ("90s", 90), ("90m", 5400), ("12h", 43_200), ("7d", 604_800), ("never", None)]
)
def test_a_lifetime_may_have_any_unit(api: FakeCheckpoints, time: str, seconds: int | None) -> None:
    done = run("checkpoints", "ttl", PATH, time, "--json")
    assert json.loads(done.stdout) == {"tinker_path": PATH, "ttl_seconds": seconds}
    [call] = api.calls
    assert (call.method, json.loads(call.content)) == ("PUT", {"ttl_seconds": seconds})


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoints", "ttl", PATH, "soon"),
        ("checkpoints", "ttl", PATH),
        ("runs", "list", "--limit", "0"),
        ("upload", "not-there", "--base-model", "m", "--name", "n"),
        ("sample", "x", "--model-path", "a", "--base-model", "b"),
        ("sample", "--json", "--base-model", "b"),
        ("nonsense",),
    ],
)
def test_a_wrongly_used_command_exits_with_2(api: FakeCheckpoints, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert not api.calls
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("checkpoints", "delete", "x"), "'x' is not tinker://<run>/<kind>/<name>"),
        (("checkpoints", "delete", PATH), "404: no such thing"),
    ],
)
def test_an_error_is_printed_in_one_line(api: FakeCheckpoints, arguments: tuple[str, ...], printed: str) -> None:
    api.answers[URL] = [refusal(404, "no such thing")]
    done = run(*arguments)
    assert (done.exit_code, done.stderr) == (1, f"{printed}\n")


def test_a_missing_key_is_reported_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTRAIN_API_KEY", raising=False)
    for command in (["models"], ["sample", "x", "--base-model", "m"]):
        done = run(*command)
        assert done.exit_code == 1
        assert "COTRAIN_API_KEY" in done.stderr


@pytest.mark.parametrize("command", [["top"], ["sample", "x", "--base-model", "m"]])
def test_an_unreachable_server_is_named(command: list[str]) -> None:
    done = run(*command, env={"COTRAIN_BASE_URL": NO_SERVER, "COTRAIN_API_KEY": "tml-key"})
    assert done.exit_code == 1
    assert done.stderr.startswith(f"cannot reach {NO_SERVER}: ")
    assert done.stderr.count("\n") == 1


def test_the_help_has_examples_and_the_variable_of_the_server() -> None:
    assert "COTRAIN_BASE_URL" in run("--help").stdout
    assert "PEFT folder, or a tar" in run("upload", "--help").stdout
    for command in (["checkpoints", "ttl"], ["runs", "list"], ["sample"], ["top"], ["download"]):
        assert f"cotrain {' '.join(command)}" in run(*command, "--help").stdout


def test_a_shell_is_offered_completion() -> None:
    assert "--install-completion" in run("--help").stdout
