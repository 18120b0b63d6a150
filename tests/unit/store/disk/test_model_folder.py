"""Folders that hold no base model, each refused with a reason and a remedy."""

from pathlib import Path

import pytest

from cotrain_store.disk.model_folder import has_tokenizer, why_not_served

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def folder(path: Path, *names: str) -> str:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return str(path)


def test_a_model_and_a_hub_id_are_served(tmp_path: Path) -> None:
    assert not why_not_served(folder(tmp_path / "whole", CONFIG, "model-00001-of-00002.safetensors"))
    assert not why_not_served(folder(tmp_path / "older", CONFIG, "pytorch_model.bin"))
    assert not why_not_served("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "the folder has no config.json: give the folder of a model, or a hub id."),
        ((WEIGHTS, TOKENIZER), "the folder has no config.json: give the folder of a model, or a hub id."),
        (("model.gguf",), "it holds a GGUF file, which cannot be trained: give the model it was made from."),
        (("adapter_config.json", "adapter_model.safetensors"), "it is a LoRA adapter: give the model that it was "),
        ((CONFIG, WEIGHTS, "adapter_config.json"), "the folder holds an adapter as well (adapter_config.json): move"),
        ((CONFIG, TOKENIZER), "the folder has no weights (model.safetensors): fetch or copy them again."),
        ((CONFIG, TOKENIZER, "model.gguf"), "the folder has no weights (model.safetensors): fetch or copy them again."),
    ],
)
def test_another_folder_is_refused_with_a_reason(tmp_path: Path, names: tuple[str, ...], reason: str) -> None:
    assert why_not_served(folder(tmp_path / "given", *names)).startswith(reason)


def test_a_file_and_the_folder_above_a_model_are_refused(tmp_path: Path) -> None:
    inside = folder(tmp_path / "model", CONFIG, WEIGHTS)
    assert why_not_served(str(tmp_path)) == f"the folder has no config.json: did you mean {inside}?"
    assert why_not_served(f"{inside}/{WEIGHTS}") == "it is a file: give the folder of a model, which holds config.json."


def test_a_file_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda file, mode: file.name != WEIGHTS)  # root can read every file
    reason = why_not_served(folder(tmp_path / "model", CONFIG, WEIGHTS))
    assert reason.startswith(f"its {WEIGHTS} may not be read by user ")


def test_a_tokenizer_is_found_by_its_files(tmp_path: Path) -> None:
    assert not has_tokenizer(folder(tmp_path / "without", CONFIG, WEIGHTS))
    assert has_tokenizer(folder(tmp_path / "with", CONFIG, WEIGHTS, TOKENIZER))
    assert has_tokenizer("Qwen/Qwen3-0.6B")
