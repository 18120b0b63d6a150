"""Commands: their output, errors and exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from cotrain import ServiceClient
from cotrain.cli import command_line
from cotrain.commands import sample, terminal, workers
from cotrain.commands.sample import stream
from cotrain.errors import BadRequestError, InternalServerError, MalformedMessage
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


def test_an_empty_list_is_announced_next_to_it(api: FakeCheckpoints) -> None:
    api.paths_stored = []
    done = run("checkpoints", "list")
    assert (done.exit_code, done.stderr) == (0, "The list is empty.\n")
    assert json.loads(run("checkpoints", "list", "--json").stdout) == []


def test_a_file_without_a_conversation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = run("data", "show", str(tmp_path / "empty.jsonl"))
    assert (done.exit_code, done.stderr) == (1, f"{tmp_path}/empty.jsonl has no conversation to train on\n")


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
    done = run("download", PATH, "-o", str(tmp_path / "in"), "--json")
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


def test_the_help_names_the_variable_of_the_server_and_offers_completion() -> None:
    shown = run("--help").stdout
    assert "COTRAIN_BASE_URL" in shown
    assert "--install-completion" in shown


PASSED = {
    "asked_at": 5.0, "at": 6.0, "took_s": 0.25, "ok": True, "problem": "", "runs": 6, "tokens": 318,
    "tolerance": 0.0, "logprobs": 0.0, "gradients": 0.0, "weights": 0.0,
    "samples": None,
}  # fmt: skip
LEAK = {**PASSED, "ok": False, "logprobs": 0.5, "problem": "The logprobs of self-check:1 differ."}


def worker(name: str, result: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "pool": "p", "base_model": "m", "id": name, "state": "serving", "drain_asked_at": None,
        "drain_waits": False, "heartbeat": {"self_check": result}, "open_steps": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("results", "status", "words"),
    [
        ({"w0": PASSED, "w1": PASSED}, 0, "passed"),
        ({"w0": PASSED, "w1": LEAK}, 1, "w1: The logprobs of self-check:1 differ."),
        ({"w0": PASSED, "w1": {**PASSED, "asked_at": 4.0}}, 2, "no result in time"),
        ({"w0": LEAK, "w1": None}, 1, "FAILED"),
        ({}, 2, "worker"),
    ],
)
def test_the_exit_status_is_that_of_the_worst_worker(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, Any], status: int, words: str
) -> None:
    def answer(_: object, method: str, *__: str) -> dict[str, Any]:
        workers = [worker(name, result) for name, result in results.items()]
        return {"workers": workers} if method == "GET" else {"asked_at": 5.0}

    monkeypatch.setattr(workers, "ask_admin", answer)
    monkeypatch.setattr(workers, "POLL_S", 0.0)
    times = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(times)))
    found: Result = CliRunner().invoke(command_line([]), ["selfcheck", "--timeout", "3"])
    assert (found.exit_code, words in found.output) == (status, True), found.output


ASKED = {"model": "m"}
ONE = b'data: {"choices": [{"text": "one"}]}\n\n'


def serving(*events: bytes, status: int = 200) -> httpx.Client:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=b"".join(events))

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")


def test_text_parts_are_yielded_and_keep_alive_lines_are_not() -> None:
    chat = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    part = 'data: {"choices": [{"delta": {"content": "zwölf"}}]}\n\n'.encode()
    usage = b'data: {"choices": []}\n\n'
    done = b"data: [DONE]\n\n"
    with serving(ONE, b": still working\n\n", chat, part, usage, done) as http:
        assert "".join(stream(http, "x", ASKED)) == "onezwölf"


def test_a_failure_in_the_middle_is_raised_after_the_earlier_parts() -> None:
    came: list[str] = []
    with (
        serving(ONE, b'data: {"error": {"message": "The worker died."}}\n\n') as http,
        pytest.raises(InternalServerError, match=r"^500: The worker died\.$"),
    ):
        came.extend(stream(http, "x", ASKED))
    assert came == ["one"]


def test_a_refusal_is_read_in_the_format_of_its_api() -> None:
    with (
        serving(b'{"error": {"message": "seed: too large", "code": "x"}}', status=400) as http,
        pytest.raises(BadRequestError, match=r"^400: seed: too large$"),
    ):
        list(stream(http, "x", ASKED))


def test_an_answer_that_is_not_json_is_reported() -> None:
    with serving(b"data: <html>\n\n") as http, pytest.raises(MalformedMessage):
        list(stream(http, "x", ASKED))


def test_an_answer_interrupted_by_the_user_keeps_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(*_: object) -> Iterator[str]:
        yield "as far"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream", parts)
    with serving() as http:
        assert sample._answer(http, [], ASKED) == "as far"
    assert capsys.readouterr().out == "as far\n"


def test_control_characters_of_a_model_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\x1b[2Ja\tb\n"  # a file gets it unchanged
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}[2Ja\tb\n"
