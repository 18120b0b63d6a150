"""The `cotrain` command against a real server."""

from __future__ import annotations

import csv
import json
import random
import re
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from typer.testing import CliRunner, Result

from cotrain import AdamParams, Datum, ModelInput, ServiceClient
from cotrain.cli import command_line
from tests.conformance.running import KEYS, ROOT, Server

KEY = KEYS[1]


class Run(Protocol):
    """Function that runs the command with the tenant's key or with `key`."""

    def __call__(self, *arguments: str, key: str = KEY, input: str | None = None) -> Result: ...


@pytest.fixture(scope="module")
def cotrain(server: Server) -> Run:
    app = command_line([])

    def run(*arguments: str, key: str = KEY, input: str | None = None) -> Result:
        environment = {
            "COTRAIN_BASE_URL": server.address, "COTRAIN_API_KEY": key,
            "COTRAIN_DATA_DIR": str(server.data_dir),
        }  # fmt: skip
        return CliRunner().invoke(app, arguments, input=input, env=environment)

    return run


@pytest.fixture(scope="module")
def paths(server: Server) -> list[str]:
    """A run's training checkpoint and its sampler weights."""
    tokens = random.Random(0).choices(range(512), k=20)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 19},
    )
    with ServiceClient(server.address, KEY) as service:
        run = service.create_lora_training_client(
            server.base_model, rank=2, seed=1, user_metadata={"made": "for the terminal"}
        )
        run.forward_backward([datum], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=1e-2))
        saved = run.save_state("kept"), run.save_weights_for_sampler("sampled")
        return [str(future.result().path) for future in saved]


def read(done: Result) -> Any:
    """Parse the JSON output of a command."""
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_models_are_listed(cotrain: Run, server: Server) -> None:
    [model] = read(cotrain("models", "--json"))
    assert model["model_name"] == server.base_model
    assert set(model) == documented("models")
    assert server.base_model in cotrain("models").stdout


def test_a_run_is_listed_and_shown(cotrain: Run, paths: list[str], server: Server) -> None:
    run_id = paths[0].split("/")[2]
    listed = read(cotrain("runs", "list", "--limit", "1", "--json"))
    assert listed[0]["training_run_id"] == run_id
    assert run_id in cotrain("runs", "list").stdout

    shown = read(cotrain("runs", "show", run_id, "--json"))
    assert {each["tinker_path"] for each in shown["checkpoints"]} == set(paths)
    assert shown == read(cotrain("runs", "show", paths[0], "--json"))
    text = cotrain("runs", "show", run_id).stdout
    for expected in (server.base_model, "for the terminal", *paths):
        assert expected in text


def test_the_history_of_a_run_is_shown_written_and_exported(
    cotrain: Run, paths: list[str], server: Server, tmp_path: Path
) -> None:
    run_id = paths[0].split("/")[2]
    with ServiceClient(server.address, KEY) as service:
        rest = service.create_rest_client()
        [point] = rest.get_training_run_history(run_id).result().points
    assert (point.kind, point.step, point.weight_sum) == ("optim_step", 1, 19.0)
    assert read(cotrain("runs", "history", run_id, "--last", "1", "--json")) == [point.model_dump()]
    [row] = csv.DictReader(cotrain("runs", "history", run_id, "--csv").stdout.splitlines())
    assert (float(row["loss_sum"]), float(row["grad_norm"])) == (point.loss_sum, point.grad_norm)
    assert f"{point.loss:.6g}" in cotrain("runs", "history", run_id).stdout
    to_nothing = cotrain("runs", "export", "x:train:0", "--to", "tensorboard")
    assert (to_nothing.exit_code, to_nothing.stdout) == (1, "")

    pytest.importorskip("tensorboard")
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    given = ("--to", "tensorboard", "--output", str(tmp_path))
    assert cotrain("runs", "export", run_id, *given).exit_code == 0
    shown = events.EventAccumulator(str(tmp_path / run_id.replace(":", "_"))).Reload()
    [scalar] = shown.Scalars("train/loss_sum")
    assert (scalar.step, scalar.wall_time) == (1, point.time_s)
    assert scalar.value == pytest.approx(point.loss_sum, rel=1e-6)


def test_a_run_is_noted_and_tagged(cotrain: Run, paths: list[str]) -> None:
    run_id = paths[0].split("/")[2]
    assert cotrain("runs", "note", run_id, "a <b>note</b>").exit_code == 0
    assert read(cotrain("runs", "tag", run_id, "x", "y", "--json"))["tags"] == ["x", "y"]
    labelled = read(cotrain("runs", "tag", run_id, "z", "--remove", "x", "--json"))
    assert labelled == {"training_run_id": run_id, "note": "a <b>note</b>", "tags": ["y", "z"]}
    [found] = read(cotrain("runs", "list", "--tag", "y", "--text", "NOTE", "--json"))
    assert found["training_run_id"] == run_id
    assert read(cotrain("runs", "list", "--tag", "x", "--json")) == []
    assert "a <b>note</b>" in cotrain("runs", "show", run_id).stdout


def test_a_run_is_ended_by_command(cotrain: Run, server: Server) -> None:
    with ServiceClient(server.address, KEY) as service:
        run_id = service.create_lora_training_client(server.base_model, rank=4).model_id
        [listed] = read(cotrain("runs", "list", "--limit", "1", "--json"))
        assert (listed["training_run_id"], listed["state"]) == (run_id, "idle")
        ended = read(cotrain("runs", "end", run_id, "--json"))
    assert ended == {"training_run_id": run_id, "ended": True}
    shown = read(cotrain("runs", "show", run_id, "--json"))
    assert (shown["state"], shown["steps"], shown["failed_requests"]) == ("ended", 0, 0)


def test_a_truncated_list_reports_it(cotrain: Run, paths: list[str]) -> None:
    assert paths
    whole = len(read(cotrain("runs", "list", "--limit", "1000", "--json")))
    done = cotrain("runs", "list", "--limit", "1")
    assert done.stderr == (f"{whole - 1} more: --limit, --offset\n" if whole > 1 else "")


def test_a_checkpoint_is_downloaded_to_a_folder_and_uploaded(
    cotrain: Run, paths: list[str], server: Server, tmp_path: Path
) -> None:
    said = read(cotrain("download", paths[0], "--output", str(tmp_path), "--json"))
    assert {each.name for each in tmp_path.iterdir()} == set(said["files"])
    archive = tmp_path.with_suffix(".tar")
    assert cotrain("download", paths[0], "--archive", str(archive)).stdout == f"{archive}\n"
    with tarfile.open(archive) as opened:
        assert {Path(name).name for name in opened.getnames()} >= set(said["files"])
    given = ("--base-model", server.base_model, "--name", "back", "--ttl-seconds", "7200")
    path = cotrain("upload", str(tmp_path), *given).stdout.strip()

    shown = read(cotrain("checkpoints", "show", path, "--json"))
    assert (shown["tinker_path"], shown["lora_rank"]) == (path, 2)
    assert shown["expires_at"] is not None
    assert cotrain("checkpoints", "ttl", path, "never").stdout == f"{path} is kept\n"
    assert read(cotrain("checkpoints", "show", path, "--json"))["expires_at"] is None

    assert not read(cotrain("checkpoints", "show", path, "--json"))["public"]
    assert cotrain("checkpoints", "publish", path).stdout == f"published {path}\n"
    assert "yes" in cotrain("checkpoints", "show", path).stdout
    assert read(cotrain("checkpoints", "unpublish", path, "--json"))["public"] is False

    run_id = path.split("/")[2]
    [listed] = read(cotrain("checkpoints", "list", "--run", run_id, "--json"))
    assert listed["tinker_path"] == path
    assert cotrain("checkpoints", "delete", path).stdout == f"deleted {path}\n"
    done = cotrain("checkpoints", "delete", path)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)


def test_chat_data_is_shown_with_the_servers_tokenizer(cotrain: Run, tmp_path: Path) -> None:
    pairs = [("user", "import"), ("assistant", "def"), ("user", "a"), ("assistant", "return x")]
    row = {"messages": [{"role": role, "content": text} for role, text in pairs]}
    file = tmp_path / "chat.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    shown = cotrain("data", "show", str(file), "--train-on", "all_answers", "--first", "1").stdout
    assert shown.count("---") == 1
    assert "assistant\n⟦def<|im_end|>⟧\n<|im_start|>user" in shown
    assert "2 conversations gave 2 datums" in shown
    answer = read(cotrain("data", "show", str(file), "--json"))
    assert set(answer) == documented("data show")
    assert answer["shown"][0].endswith("⟦return x<|im_end|>⟧\n")
    file.write_text("{}")
    done = cotrain("data", "show", str(file))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "chat.jsonl:1 has no list `messages`" in done.stderr


def test_the_fields_of_json_are_the_documented_ones(cotrain: Run, paths: list[str]) -> None:
    """Compare the documented fields with the printed ones."""
    run_id = paths[0].split("/")[2]
    answers = {
        "models": read(cotrain("models", "--json")),
        "runs list": read(cotrain("runs", "list", "--json")),
        "runs tag": read(cotrain("runs", "tag", run_id, "--json")),
        "runs history": read(cotrain("runs", "history", run_id, "--json")),
        "checkpoints list": read(cotrain("checkpoints", "list", "--run", run_id, "--json")),
        "sample PROMPT": read(cotrain("sample", "x", "--json")),
        "top": read(cotrain("top", "--json")),
        "version": read(cotrain("version", "--json")),
    }
    for command, answer in answers.items():
        first = answer[0] if isinstance(answer, list) else answer
        assert set(first) <= documented(command), command
    shown = read(cotrain("runs", "show", run_id, "--json"))
    assert set(shown) == set(answers["runs list"][0]) | {"checkpoints"}
    kept = read(cotrain("checkpoints", "show", paths[0], "--json"))
    assert set(kept) <= set(answers["checkpoints list"][0]) | documented("checkpoints show")


def documented(command: str) -> set[str]:
    """Return the documented fields of a command's JSON."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    [row] = re.findall(rf"^\| `{re.escape(command)}`.*? \| (.*) \|$", page, re.MULTILINE)[-1:]
    return set(re.findall(r"`([a-z_]+)`", row))


def test_a_completion_is_the_same_with_and_without_streaming(cotrain: Run, paths: list[str], server: Server) -> None:
    asked = ("sample", "import ", "--seed", "7", "--max-tokens", "12")
    whole = read(cotrain(*asked, "--json"))
    assert whole["model"] == server.base_model
    assert set(whole) == {"model", "samples", "prompt_tokens", "sampled_tokens"}
    [sample] = whole["samples"]
    assert 0 < whole["sampled_tokens"] <= 12
    assert cotrain(*asked).stdout == sample["text"] + "\n"
    assert cotrain(*asked, "--base-model", server.base_model).stdout == sample["text"] + "\n"
    piped = ("sample", "-", *asked[2:])
    assert cotrain(*piped, input="import ").stdout == sample["text"] + "\n"

    tuned = read(cotrain(*asked, "--model-path", paths[1], "--num-samples", "2", "--json"))
    assert (tuned["model"], len(tuned["samples"])) == (paths[1], 2)
    shown = cotrain(*asked, "--model-path", paths[1], "--num-samples", "2").stdout
    assert shown == "".join(f"--- {number}\n{each['text']}\n" for number, each in enumerate(tuned["samples"], 1))


def test_a_chat_keeps_its_history(cotrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    how = ("--seed", "3", "--max-tokens", "5")
    first = cotrain("sample", "--chat", "Hello", *how).stdout
    sent: list[Any] = []
    really = httpx.Client.stream

    def stream(self: httpx.Client, *arguments: Any, **options: Any) -> Any:
        sent.append([turn["content"] for turn in options["json"]["messages"]])
        return really(self, *arguments, **options)

    monkeypatch.setattr(httpx.Client, "stream", stream)
    both = cotrain("sample", *how, input="Hello\n\nAnd now?\n")
    assert both.exit_code == 0
    assert both.stdout.startswith(first)
    assert sent == [["Hello"], ["Hello", first.removesuffix("\n"), "And now?"]]
    assert cotrain("sample", "--system", "Be short.", *how, input="Hello\n").stdout != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sample", "x", "--base-model", "nobody/knows"), "404: "),
        (("sample", "x", "--seed", "9" * 30), "400: "),
        (("sample", "--chat", "x", "--seed", "9" * 30), "400: "),
        (("runs", "show", "nobody:train:0"), "404: "),
        (("checkpoints", "show", "tinker://nobody:train:0/weights/a"), "404: "),
        (("checkpoints", "ttl", "tinker://nobody:train:0/weights/a", "7d"), "404: "),
        (("download", "tinker://nobody:train:0/weights/a"), "404: "),
    ],
)
def test_a_rejection_by_the_server_is_one_sentence(cotrain: Run, arguments: tuple[str, ...], said: str) -> None:
    done = cotrain(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("command", [["models"], ["top"], ["sample", "x", "--base-model", "m"]])
def test_a_wrong_key_is_refused_in_one_sentence(cotrain: Run, command: list[str]) -> None:
    done = cotrain(*command, key="tml-wrong_key")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("401: ")


def test_a_tenant_watches_its_own_runs_and_the_operator_all(cotrain: Run, paths: list[str], server: Server) -> None:
    own = read(cotrain("top", "--json"))
    assert own["pools"][0]["tenants"] == own["pools"][0]["cycles"] == []
    everything = read(cotrain("top", "--all", "--json"))
    [pool] = everything["pools"]
    assert pool["workers"][0]["id"]
    tenants = {run["tenant"] for cycle in pool["cycles"] for run in cycle["runs"]}
    assert len(pool["cycles"]) >= 1
    assert tenants

    shown = cotrain("top", "--all", "--once").stdout
    assert server.base_model in shown
    assert "ready" in shown
    assert str(pool["cycles"][0]["cycle"]) in shown
    assert server.base_model in cotrain("top").stdout


def test_a_webhook_is_set_shown_and_removed(cotrain: Run) -> None:
    assert read(cotrain("webhooks", "set", "https://hooks.invalid/x", "--json"))["secret"].startswith("whsec_")
    assert read(cotrain("webhooks", "show", "--json"))["url"] == "https://hooks.invalid/x"
    assert read(cotrain("webhooks", "remove", "--json")) == {"removed": True}
    gone = cotrain("webhooks", "show")
    assert (gone.exit_code, "No webhook is set" in gone.stderr) == (1, True)
