"""A base model that cannot be served ends the server with a sentence, however often it would be tried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import transformers

from tests.support.processes import ended, settings_of
from tests.support.redis_server import EmbeddedRedis


def state_space_model(folder: Path) -> Path:
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
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
