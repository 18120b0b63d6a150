from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from cotrain import ServiceClient, TrainingClient
from cotrain.clients.tokenizer import tokenizer_name
from cotrain.errors import TokenizerMissing
from tests.support.fake_api import FakeApi, refusal
from tests.support.tiny_models import build_tiny_qwen3

CONFIG = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("base_model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:long", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B/long", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.2-1B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ("mine", "mine"),
    ],
)
def test_a_variant_has_the_tokenizer_of_its_model(base_model: str, name: str) -> None:
    assert tokenizer_name(base_model) == name


def test_a_folder_is_loaded_as_a_tokenizer_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert tokenizer_name(str(folder)) == str(folder)


@pytest.fixture
def run(api: FakeApi) -> Iterator[TrainingClient]:
    with ServiceClient("http://server", "tml-key", network=api.network) as client:
        yield client.create_lora_training_client("my model/?&")


def served(files: dict[str, str]) -> httpx.Response:
    return httpx.Response(200, json={"files": files})


def test_the_tokenizer_of_the_server_is_loaded_without_its_code(
    api: FakeApi, run: TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    folder = build_tiny_qwen3(tmp_path / "tiny")
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", CONFIG)}
    api.answers["tokenizers"] = [served({**files, "../../outside.py": "", "code.py": ""})]
    tokenizer = run.get_tokenizer()
    own = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("def f(x): return 'ü'") == own.encode("def f(x): return 'ü'")
    assert tokenizer.eos_token == own.eos_token
    assert api.calls[-1].url.params["base_model"] == "my model/?&"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary", "tiny"]
    assert not list((tmp_path / "temporary").glob("cotrain-*"))


@pytest.mark.parametrize("status", [400, 404])
def test_without_one_on_the_server_it_is_loaded_by_its_name(api: FakeApi, tmp_path: Path, status: int) -> None:
    folder = build_tiny_qwen3(tmp_path / "tiny")
    api.answers["tokenizers"] = [refusal(status)]
    with ServiceClient("http://server", "tml-key", network=api.network) as client:
        assert client.create_lora_training_client(str(folder)).get_tokenizer().encode("def")


@pytest.mark.parametrize("config", ["", '{"model_type": "qwen3"}', '{"model_type": "llama"}'])
def test_a_tokenizer_that_is_not_found_is_named(api: FakeApi, tmp_path: Path, config: str) -> None:
    api.answers["tokenizers"] = [refusal(404)]
    if config:  # transformers makes a tokenizer without a vocabulary of it
        (tmp_path / "config.json").write_text(config)
    with ServiceClient("http://server", "tml-key", network=api.network) as client:
        run = client.create_lora_training_client(str(tmp_path))
        with pytest.raises(TokenizerMissing, match=f"no tokenizer '{tmp_path}'"):
            run.get_tokenizer()


def test_an_unreachable_hub_is_not_waited_for(
    api: FakeApi, run: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers["tokenizers"] = [refusal(404)]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    asked: list[bool] = []

    def nothing(_: str, *, local_files_only: bool, trust_remote_code: bool) -> None:
        assert not trust_remote_code
        asked.append(local_files_only)
        raise OSError("not here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", nothing)
    with pytest.raises(TokenizerMissing, match=r"the hub cannot be reached: .*; load .* yourself"):
        run.get_tokenizer()
    assert asked == [True]


@pytest.mark.parametrize("broken", ['{"version', '{"version": "9.0", "model": {"type": "New"}}'])
def test_an_unreadable_tokenizer_is_reported(api: FakeApi, run: TrainingClient, broken: str) -> None:
    api.answers["tokenizers"] = [served({"tokenizer.json": broken, CONFIG: "{}"})]
    with pytest.raises(TokenizerMissing, match="installed here cannot read the server's"):
        run.get_tokenizer()


def test_without_transformers_the_error_says_what_to_install(
    run: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerMissing, match="pip install transformers"):
        run.get_tokenizer()
