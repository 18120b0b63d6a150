from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cotrain import ServiceClient, checkpoint_cli
from tests.support.fake_api import refusal
from tests.support.fake_checkpoints import FakeCheckpoints

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

PATH = "tinker://s1:train:0/weights/mine"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeCheckpoints:
    fake = FakeCheckpoints()
    monkeypatch.setenv("COTRAIN_API_KEY", "tml-key")
    monkeypatch.setattr(
        checkpoint_cli, "ServiceClient", lambda: ServiceClient(network=fake.network)
    )
    return fake


def run(*arguments: str) -> Result:
    return CliRunner().invoke(checkpoint_cli.app, arguments)


def test_an_upload_prints_the_path(api: FakeCheckpoints, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    done = run(
        "upload", str(tmp_path), "--base-model", "m", "--name", "mine", "--ttl-seconds", "3600"
    )
    assert (done.exit_code, done.stdout) == (0, f"{PATH}\n")
    assert api.uploads[0][0]["ttl_seconds"] == "3600"


def test_a_list_shows_whole_paths(api: FakeCheckpoints) -> None:
    api.paths_stored = [f"tinker://{'x' * 90}:train:0/weights/final"]
    done = run("list")
    assert done.exit_code == 0
    assert api.paths_stored[0] in done.stdout
    assert "1.0 kB" in done.stdout
    assert "2026-01-02 03:04" in done.stdout
    assert "never" in done.stdout


def test_a_download_is_written_where_it_is_asked_to(api: FakeCheckpoints, tmp_path: Path) -> None:
    api.files = {"adapter_config.json": b"{}"}
    assert run("download", PATH, "--output", str(tmp_path / "in")).exit_code == 0
    assert (tmp_path / "in" / "adapter_config.json").read_bytes() == b"{}"


def test_several_checkpoints_are_deleted_at_once(api: FakeCheckpoints) -> None:
    assert run("delete", PATH, f"{PATH}2").exit_code == 0
    assert [call.method for call in api.calls] == ["DELETE", "DELETE"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("delete", "x"), "is not tinker://"), (("delete", PATH), "404: no such thing")],
)
def test_what_goes_wrong_is_said_in_one_line(
    api: FakeCheckpoints, arguments: tuple[str, ...], said: str
) -> None:
    api.answers[
        PATH.replace("tinker://", "training_runs/").replace("/weights", "/checkpoints/weights")
    ] = [refusal(404, "no such thing")]
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_key_the_user_is_told_which_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTRAIN_API_KEY", raising=False)
    done = run("list")
    assert done.exit_code == 1
    assert "COTRAIN_API_KEY" in done.stderr


def test_help_says_what_can_be_brought() -> None:
    assert "tar or zip" in run("upload", "--help").stdout
    assert "COTRAIN_BASE_URL" in run("--help").stdout
