"""`cotrain serve` as an operator meets it: keys, deaths of every process, an orderly and a hard end, refused models.

One of the servers is started by the interpreter, as an operator's is (`by_interpreter`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import redis
import torch
import transformers
import typer
from typer.testing import CliRunner

from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from cotrain_server.commands import keys
from cotrain_server.commands import serve as serve_command
from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.disk.embedded_redis import last_file
from tests.support.processes import ended, settings_of
from tests.support.redis_server import EmbeddedRedis
from tests.support.serving import Serving
from tests.support.waiting import wait_until
from tests.warm.popen import Popen, run
from tests.warm.sources import COMMAND

PATIENCE_S = 300
HAS_IPV6 = Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text() != ""


def pids(serving: Serving) -> dict[str, int]:
    """Find each process as it was last started."""
    return {name: int(pid) for name, pid in re.findall(r"(\S+) started \(pid (\d+)\)", serving.log)}


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] != "Z"
    return False


def train(run: TrainingClient) -> float:
    """Train one step and return its loss."""
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    loss = run.forward_backward([datum], "cross_entropy")
    step = run.optim_step(AdamParams(learning_rate=1e-2))
    step.result(PATIENCE_S)
    return loss.result(PATIENCE_S).metrics["loss:sum"]


def test_a_new_server_makes_a_key_survives_every_death_and_ends_in_order(tmp_path: Path, base_model: str) -> None:
    with Serving(tmp_path, [base_model], []) as serving:
        key = re.findall(r"API key, shown only now: (\S+)", serving.log)[0]
        assert find_in_files(tmp_path, key.partition("_")[2]) == []
        with ServiceClient(base_url=serving.address, api_key=key) as service:
            run = service.create_lora_training_client("tiny", rank=4)
            losses = [train(run)]
            for name in ("worker-w0", "scheduler", "api", "redis"):
                os.kill(pids(serving)[name], signal.SIGKILL)
                losses.append(train(run))
            assert losses == sorted(losses, reverse=True)
        assert serving.stop() == 0
        assert serving.log.rstrip().endswith("stopped")
        assert not any(is_alive(pid) for pid in pids(serving).values())
        os.close(DataFolder(tmp_path).lock())


def test_a_supervisor_shows_no_key_and_when_it_is_killed_takes_everything_with_it_and_can_start_again(
    tmp_path: Path, base_model: str
) -> None:
    key = "tml-given_by-the-operator"
    with Serving(tmp_path, [base_model], [f"lab={key}"], by_interpreter=True) as serving:
        for pid in (serving._process.pid, *pids(serving).values()):
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        refused = run_cotrain("keys", "revoke", "nobody", f"--data-dir={tmp_path}")
        assert "There is no key nobody." in refused.stderr
        started = pids(serving)
        serving._process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in started.values()))
    log = last_file(DataFolder(tmp_path).redis)
    assert log is not None
    with log.open("ab") as end:  # as after a power cut
        end.write(bytes(4096))
    host = "::" if HAS_IPV6 else "0.0.0.0"
    with Serving(tmp_path, [base_model], [key], [f"--host={host}"]) as serving:
        assert f"cut 4096 zero bytes off the end of {log}" in serving.log
        at, _, port = serving.address.rpartition(":")
        assert at == ("http://[::1]" if HAS_IPV6 else "http://127.0.0.1")
        for address in (serving.address, f"http://127.0.0.1:{port}"):
            readiness = json.load(urllib.request.urlopen(f"{address}/readyz"))
            assert readiness == {"ready": True, "reasons": []}
        with ServiceClient(base_url=serving.address, api_key=key) as service:
            train(service.create_lora_training_client("tiny", rank=4))


def test_a_key_is_good_as_long_as_it_stands_in_the_settings(tmp_path: Path, base_model: str) -> None:
    old, new, at = "tml-0ld_key-of-the-lab", "tml-new_key-of-the-lab", f"--data-dir={tmp_path}"
    with Serving(tmp_path, [base_model], [f"lab={old}"]) as serving:
        assert status_of(serving, old) == 200
        (listed,) = json.loads(run_cotrain("keys", "list", "--json", at).stdout)
        assert (listed["name"], listed["prefix"], listed["source"]) == ("lab", "tml-0ld_", "settings")
        refused = run_cotrain("keys", "revoke", listed["id"], at)
        assert refused.returncode == 1
        assert "Remove it from --api-key, COTRAIN_API_KEYS" in refused.stderr
        assert status_of(serving, old) == 200
        tenant = f"--tenant={listed['tenant']}"
        laptop = run_cotrain("keys", "create", "laptop", tenant, at).stdout.strip()
    key_file = tmp_path / "keys"
    key_file.write_text(new + "\n")
    with Serving(tmp_path, [base_model], [], [f"--api-keys-file={key_file}"]) as serving:
        assert [status_of(serving, key) for key in (old, new, laptop)] == [401, 200, 200]
        names = [key["name"] for key in json.loads(run_cotrain("keys", "list", "--json", at).stdout)]
        assert sorted(names) == ["key new_…", "laptop"]
        log = DataFolder(tmp_path).log_of("api").read_text()
        assert listed["tenant"] in next(line for line in log.splitlines() if "key_left" in line)


def status_of(serving: Serving, key: str) -> int:
    headers = {"X-API-Key": key}
    request = urllib.request.Request(f"{serving.address}/api/v1/get_server_capabilities", None, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    lock = DataFolder(tmp_path).lock()
    answer = serve("--base-model=any/model", f"--data-dir={tmp_path}", "--port=0")
    os.close(lock)
    assert answer.returncode == os.EX_USAGE
    assert "Another server uses" in answer.stderr


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["--base-model=./not-there"], {}, "There is no folder ./not-there."),
        (
            ["--base-model=name=/usr"],
            {},
            "Base model /usr cannot be served: the folder has no config.json: give the folder of a model, or a hub id.",
        ),
        (["--base-model=a/b"], {"COTRAIN_CLOK_MODE": "x"}, "Unknown settings: COTRAIN_CLOK_MODE."),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    tmp_path: Path, options: list[str], settings: dict[str, str], message: str
) -> None:
    answer = serve(*options, f"--data-dir={tmp_path}", "--port=0", **settings)
    assert answer.returncode == os.EX_USAGE
    assert answer.stderr.strip() == message


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["--data-dir={file}"], {}, "The data folder {file} cannot be used: Not a directory"),
        (["--data-dir={file}/x"], {}, "The data folder {file}/x cannot be used: Not a directory"),
        (["--data-dir=/proc/x"], {}, "The data folder /proc/x cannot be used: No such file"),
        (["--data-dir=/sys/x"], {}, "The data folder /sys/x cannot be used: "),
        (["--port=80000"], {}, "--port, COTRAIN_PORT: 80000 is no port. Give 1 to 65535, or 0"),
        ([], {"COTRAIN_PORT": "-1"}, "--port, COTRAIN_PORT: -1 is no port."),
        ([], {"COTRAIN_METRICS_PORT": "65534"}, "COTRAIN_METRICS_PORT: 65534 is too high. 3 "),
        (["--host=no.invalid"], {}, "Cannot listen on no.invalid:8000: this host knows no such"),
    ],
)
def test_a_folder_or_an_address_that_cannot_be_used_is_named_with_its_reason(
    tmp_path: Path, options: list[str], settings: dict[str, str], message: str
) -> None:
    (tmp_path / "file").touch()
    given = [each.format(file=tmp_path / "file") for each in (f"--data-dir={tmp_path}", *options)]
    answer = serve("--base-model=a/b", *given, **settings)
    assert answer.returncode == os.EX_USAGE
    assert answer.stderr.startswith(message.format(file=tmp_path / "file"))
    assert len(answer.stderr.splitlines()) == 1


def test_a_worker_without_a_metrics_port_for_each_is_refused(tmp_path: Path) -> None:
    (tmp_path / "belongs-to").touch()
    refused = run_cotrain(
        "worker", "--base-model=a/b", f"--data-dir={tmp_path}", "--redis-url=redis://127.0.0.1:1/0",
        "--workers=3", "--device=cpu", COTRAIN_METRICS_PORT="65534",
    )  # fmt: skip
    assert refused.returncode == os.EX_USAGE
    assert refused.stderr.startswith("COTRAIN_METRICS_PORT: 65534 is too high. 3 processes")
    assert "give 1 to 65533" in refused.stderr


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("secret", "An API key is not `tml-` or `sk-` and letters"),
        ("ada=tml-dev", "API key 'ada' is too easy to guess"),
    ],
)
def test_a_key_that_no_sdk_would_send_or_that_is_easy_to_guess_is_refused_at_once(
    tmp_path: Path, empty_redis: EmbeddedRedis, key: str, says: str
) -> None:
    answer = serve(
        "--base-model=a/b", f"--api-key={key}", f"--data-dir={tmp_path}", f"--redis-url={empty_redis.url}", "--port=0"
    )
    assert answer.returncode == os.EX_USAGE
    assert answer.stderr.startswith(f"--api-key: {says}")
    assert len(answer.stderr.splitlines()) == 1


def test_a_redis_that_could_lose_writes_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis() as unsafe:
        with redis.Redis.from_url(unsafe.url) as connection:
            connection.config_set("appendfsync", "everysec")
        answer = serve("--base-model=a/b", f"--data-dir={tmp_path}", f"--redis-url={unsafe.url}", "--port=0")
    assert answer.returncode == os.EX_USAGE
    assert "could lose acknowledged writes: appendfsync is 'everysec'" in answer.stderr


def test_keys_are_made_listed_and_revoked(tmp_path: Path, empty_redis: EmbeddedRedis) -> None:
    at = [f"--data-dir={tmp_path}", f"--redis-url={empty_redis.url}"]
    key = run_cotrain("keys", "create", "alice", *at).stdout.strip()
    key_id, _, secret = key.removeprefix("tml-").partition("_")
    listed = run_cotrain("keys", "list", *at, COLUMNS="40").stdout  # and nothing is cut
    assert key_id in listed
    assert "alice" in listed
    assert secret not in listed
    other = run_cotrain("keys", "create", "bob", "--prefix=sk", "--role=viewer", *at).stdout.strip()
    assert other.startswith("sk-")
    [alice, bob] = json.loads(run_cotrain("keys", "list", "--json", *at).stdout)
    assert {each["name"]: each["role"] for each in (alice, bob)} == {"alice": "member", "bob": "viewer"}
    assert set(alice) == {
        "id", "tenant", "name", "role", "prefix", "source", "created_at", "not_after",
    }  # fmt: skip
    assert key.startswith(alice["prefix"])
    assert run_cotrain("keys", "revoke", key_id, *at).returncode == 0
    assert key_id not in run_cotrain("keys", "list", *at).stdout


def test_a_key_of_a_misspelt_tenant_is_not_made_without_a_word(tmp_path: Path, empty_redis: EmbeddedRedis) -> None:
    at = [f"--data-dir={tmp_path}", f"--redis-url={empty_redis.url}"]
    run_cotrain("keys", "create", "ada", *at)
    [ada] = json.loads(run_cotrain("keys", "list", "--json", *at).stdout)
    misspelt = run_cotrain("keys", "create", "laptop", "--tenant=t-ada", *at)
    assert misspelt.returncode == 1
    assert misspelt.stderr.strip() == (
        "There is no tenant t-ada: `cotrain keys list` shows the ids of those there are. With --new-tenant it is made."
    )
    assert [ask_in_a_terminal(word, "--tenant=t-ada", *at) for word in ("n", "y")] == [1, 0]
    for options in ([f"--tenant={ada['tenant']}"], ["--tenant=t-bob", "--new-tenant"]):
        assert run_cotrain("keys", "create", "laptop", *options, *at).returncode == 0
    listed = json.loads(run_cotrain("keys", "list", "--json", *at).stdout)
    assert [key["tenant"] for key in listed] == [ada["tenant"], "t-ada", ada["tenant"], "t-bob"]


def test_keys_of_a_server_that_does_not_run_are_out_of_reach(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    answer = run_cotrain("keys", "list", f"--data-dir={folder}")
    assert answer.returncode == 1
    assert f"Is `cotrain serve` running on {folder}?" in answer.stderr
    assert not folder.exists()


def test_keys_do_not_wait_for_a_redis_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keys, "TIMEOUT_S", 0.2)
    with EmbeddedRedis() as stuck:
        stuck.stand_still()
        with pytest.raises(SystemExit, match="1"):
            keys.list_keys(tmp_path, stuck.url)
    assert "does not answer. Is it the one of --redis-url?" in capsys.readouterr().err


def test_a_server_of_nothing_asks_for_a_base_model() -> None:
    refused = serve()
    assert refused.returncode == os.EX_USAGE
    assert refused.stderr.startswith("Which base model? `cotrain serve --base-model ")


def test_a_redis_that_has_no_such_address_is_refused_in_a_sentence_without_its_password() -> None:
    refused = serve("--base-model=a/b", "--redis-url=http://:hidden@host")
    assert refused.returncode == os.EX_USAGE
    assert refused.stderr.startswith("redis_url begins with none of unix://, redis://")
    assert "hidden" not in refused.stdout + refused.stderr


def test_every_option_names_its_variable() -> None:
    command_line = typer.Typer(add_completion=False)
    command_line.command()(serve_command.serve)
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    text = CliRunner().invoke(command_line, ["--help"], env=wide).stdout
    options = set(re.findall(r"--([a-z][a-z-]+)", text)) - {"help"}
    variables = set(re.findall(r"COTRAIN_[A-Z_]+", text))
    for option in options:
        stem = option.removeprefix("no-").replace("-", "_").upper()
        assert {f"COTRAIN_{stem}", f"COTRAIN_{stem}S"} & variables, option
    assert {"base-model", "data-dir", "port"} <= options


def serve(*options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_cotrain("serve", *options, **settings)


def run_cotrain(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run([COMMAND, *arguments], timeout=PATIENCE_S, env={**os.environ, **settings})


def ask_in_a_terminal(word: str, *options: str) -> int:
    """Make a key where a person can be asked, and answer; the exit status."""
    ours, theirs = os.openpty()
    with Popen(
        [COMMAND, "keys", "create", "laptop", *options],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        os.close(theirs)
        os.write(ours, f"{word}\n".encode())
        _, asked = command.communicate(timeout=PATIENCE_S)
    os.close(ours)
    assert "There is no tenant t-ada. Make it?" in asked
    return command.returncode


def find_in_files(folder: Path, secret: str) -> list[Path]:
    """List the files under a folder that hold a secret."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if secret.encode() in path.read_bytes()]


def state_space_model(folder: Path) -> Path:
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    (folder / "model.safetensors").touch()  # never read
    return folder


def test_a_server_of_several_says_which_one_is_not_supported(tmp_path: Path, tiny_model: Path) -> None:
    folder = state_space_model(tmp_path / "mamba")
    ended = serve(
        f"--base-model=good={tiny_model}",
        f"--base-model=mamba={folder}",
        f"--data-dir={tmp_path / 'data'}",
        "--torch-threads=1",
        "--port=0",
    )
    assert ended.returncode == os.EX_USAGE
    said = ended.stderr.strip()
    assert said.startswith(f"Base model {folder} cannot be served: models of type 'mamba' cannot be trained; Llama,")
    assert "\n" not in said
    assert "starting it again" not in ended.stdout
    assert ended.stdout.rstrip().endswith("stopped")


def test_a_misspelt_name_without_a_network_ends_the_server(tmp_path: Path) -> None:
    ended = serve("--base-model=somebody/misspelt", f"--data-dir={tmp_path}", "--port=0", HF_HUB_OFFLINE="1")
    assert ended.returncode == os.EX_USAGE
    assert ended.stderr.startswith(
        "Base model somebody/misspelt cannot be served: there is no such folder, the cache of this "
        "host has no model of that name"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_a_gpu_that_cannot_be_used_ends_the_server(tmp_path: Path, tiny_model: Path) -> None:
    ended = serve(f"--base-model=tiny={tiny_model}", f"--data-dir={tmp_path}", "--port=0", "--device=cuda")
    assert ended.returncode == os.EX_USAGE, ended.stderr
    assert ended.stderr.startswith("No GPU can be used: ")
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_worker_alone_ends_with_the_sentence_in_its_log(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    folder = state_space_model(tmp_path / "mamba")
    ended = worker(settings_of(empty_redis.url, tmp_path, folder))
    assert ended.returncode == 2
    refused = json.loads(ended.stderr.splitlines()[-1])
    assert next(iter(refused)) == "ts"
    assert refused["event"] == "base_model_refused"
    assert refused["reason"].startswith(f"Base model {folder} cannot be served: models of type")


def test_an_unknown_rope_type_ends_the_server(tmp_path: Path, tiny_model: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    ended = serve(f"--base-model={folder}", f"--data-dir={tmp_path / 'data'}", "--torch-threads=1", "--port=0")
    assert ended.returncode == os.EX_USAGE
    assert ended.stderr.startswith(f"Base model {folder} cannot be served: RoPE of type 'mrope' (")


def test_a_setting_that_is_none_is_named_and_not_tried_again(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    settings = settings_of(empty_redis.url, tmp_path, tmp_path)
    ended = worker({**settings, "COTRAIN_DTYPE": "float8"})
    assert ended.returncode == 2
    [refused] = map(json.loads, ended.stderr.splitlines())
    assert refused["reason"] == ("COTRAIN_DTYPE: Input should be 'auto', 'float32' or 'bfloat16'.")


def worker(settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return ended("cotrain_workers", settings)
