"""Output of `cotrain top`, and its behaviour while no server answers."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cotrain.cli import command_line
from cotrain.commands import top
from cotrain.commands.terminal import plain_http
from cotrain.commands.top import tokens_per_s, view
from cotrain.errors import APIConnectionError, MalformedMessage
from cotrain.settings import ClientSettings
from cotrain.wire.admin import CycleRecord, ServerStatus


def test_a_status_is_drawn_and_its_rate_includes_pauses() -> None:
    def cycle(number: int, started_at: float) -> CycleRecord:
        return CycleRecord.model_validate(
            {
                "cycle": number,
                "worker": "w0",
                "started_at": started_at,
                "duration_ms": 1000.0,
                "tokens": 500,
                "outcome": "isolated",
                "runs": [{"run": "s:train:0", "tenant": "ann", "tokens": 500, "ops": {"optim_step": 2}}],
            }
        )

    def worker(name: str, state: str) -> dict[str, object]:
        held = [{"runs": 1, "memory_bytes": 1}] * 4
        facts = {
            "device": "cpu", "tokens_per_s": 9.0, "runs": 2, "memory_bytes": 1,
            "members": held if state == "draining" else [],
            "restoring": {"runs_done": 3, "runs": 12, "ops_done": 41, "ops": 200} if name == "w0" else None,
        }  # fmt: skip
        return {"id": name, "state": state, **facts}

    cycles = [cycle(8, 103.0), cycle(7, 100.0)]
    assert tokens_per_s(cycles) == pytest.approx(1000 / 4)
    assert tokens_per_s([]) == 0.0
    status = ServerStatus.model_validate(
        {
            "version": "1",
            "uptime_s": 90_061.0,
            "ready": False,
            "reasons": ["No worker for m is running."],
            "pools": [
                {
                    "base_model": "m",
                    "workers": [worker("w0", "serving"), worker("w1", "draining")],
                    "workers_unavailable": ["w2"],
                    "last_cycle": 8,
                    "queue": {"ops": 1234, "tokens": 99, "oldest_s": 2.0},
                    "samples": {"waiting": 3, "running": 2},
                    "tenants": [{"tenant": "t-1", "tenant_name": "ann", "ops": 1, "tokens": 5, "bytes": 2000}],
                    "cycles": cycles,
                }
            ],
        }
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(status))
    text = console.export_text()
    for expected in (
        "not ready: No worker for m is running.",
        "1 d 01:01:01",
        "2 (groups of 4), 1 draining, w0 restoring: 3 of 12 runs, 41 of 200 ops, w2 unavailable",
        "1,234",
        "2 optim_step",
        "isolated",
        "t-1",
        "ann",
    ):
        assert expected in text


def test_watching_continues_while_the_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three polls, of which the second gets no answer. Ctrl-C comes instead of the fourth."""
    looks: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        looks.append(request.url.path)
        if len(looks) == 2:
            raise httpx.ConnectError("refused")
        pools: list[Any] = []
        return httpx.Response(200, json={"version": "1", "pools": pools})

    def sleep(_: float) -> None:
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        top._watch(http, 1.0)
    assert looks == ["/status"] * 3


def test_an_answer_that_is_not_a_status_is_reported() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="<html>")

    with (
        httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server") as http,
        pytest.raises(MalformedMessage, match="did not answer a ServerStatus"),
    ):
        top._fetch_status(http)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ClientSettings]:
    """Return the settings of the requests, none of which reaches a server."""
    asked: list[ClientSettings] = []

    def record(settings: ClientSettings) -> None:
        asked.append(settings)
        raise APIConnectionError("no server is there")

    monkeypatch.setattr(top, "plain_http", record)
    return asked


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "tml-tenant"),
        (["--admin-key", "operator"], "operator"),
        (["--all", "--admin-key", "operator"], "operator"),
    ],
)
def test_the_operator_uses_its_own_key(asked: list[ClientSettings], arguments: list[str], key: str) -> None:
    environment = {"COTRAIN_API_KEY": "tml-tenant", "COTRAIN_BASE_URL": "http://server/"}
    done = CliRunner().invoke(command_line([]), ["top", *arguments], env=environment)
    assert (done.exit_code, done.stderr) == (1, "no server is there\n")
    assert asked == [ClientSettings("http://server", key)]


@pytest.mark.parametrize(
    ("url", "arguments", "key"),
    [
        ("http://127.0.0.1:1", ["--all"], "kept"),
        ("http://localhost:1", [], "kept"),
        ("http://127.0.0.1:1", ["--api-key", "tml-tenant"], "tml-tenant"),
    ],
)
def test_the_operator_key_is_read_from_the_data_folder_on_the_host(
    asked: list[ClientSettings], tmp_path: Path, url: str, arguments: list[str], key: str
) -> None:
    (tmp_path / "admin-key").write_text("kept\n")
    environment = {"COTRAIN_API_KEY": "", "COTRAIN_DATA_DIR": str(tmp_path)}
    CliRunner().invoke(command_line([]), ["top", "--base-url", url, *arguments], env=environment)
    assert asked == [ClientSettings(url, key)]


@pytest.mark.parametrize(("words", "key"), [((), ""), (("--all",), "tml-tenant")])
def test_a_missing_key_is_a_sentence(asked: list[ClientSettings], tmp_path: Path, words: list[str], key: str) -> None:
    environment = {"COTRAIN_API_KEY": key, "COTRAIN_DATA_DIR": str(tmp_path)}
    done = CliRunner().invoke(command_line([]), ["top", "--base-url", "http://127.0.0.1:1", *words], env=environment)
    assert (done.exit_code, asked) == (1, [])
    assert "The admin key is needed: COTRAIN_ADMIN_KEY, or on the server's host" in done.stderr
    assert ("COTRAIN_API_KEY" in done.stderr) == (not words)


def test_no_key_is_shown_if_there_is_none() -> None:
    with plain_http(ClientSettings("http://server", "")) as http:
        assert "X-API-Key" not in http.headers
    with plain_http(ClientSettings("http://server", "operator")) as http:
        assert http.headers["X-API-Key"] == "operator"
