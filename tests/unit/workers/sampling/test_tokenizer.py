"""Tokenizer of a base model, published for processes without the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from cotrain_store.blobs.folder import Folder
from cotrain_workers.sampling.tokenizer import PublishedTokenizer, publish_tokenizer
from tests.support.tiny_models import build_tiny, build_tiny_qwen3


def published(source: Path, folder: Path) -> PublishedTokenizer | None:
    return publish_tokenizer(str(source), "tiny-1", Folder(folder), local_files_only=True)


def test_a_published_tokenizer_equals_that_of_the_model(tmp_path: Path) -> None:
    made = published(build_tiny_qwen3(tmp_path / "model"), tmp_path / "published")
    assert made is not None
    assert made.folder.startswith("tiny-1-")
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "published" / made.folder / "tokenizer.json"))
    tokens = read.encode("def f(x): return 'ü'").ids
    assert made.text(tokens) == "def f(x): return 'ü'"


def test_the_previous_major_transformers_reads_a_published_tokenizer(tmp_path: Path) -> None:
    made = published(build_tiny_qwen3(tmp_path / "model"), tmp_path / "published")
    assert made is not None
    folder = tmp_path / "published" / made.folder
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert made.text(tokenizer.encode("def f(x): return 'ü'")) == "def f(x): return 'ü'"


def test_publishing_twice_changes_nothing_and_leaves_no_files(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model")
    first = published(model, tmp_path / "published")
    again = published(model, tmp_path / "published")
    assert first is not None
    assert again is not None
    assert first.folder == again.folder
    assert [path.name for path in (tmp_path / "published").iterdir()] == [first.folder]


def test_a_damaged_folder_is_written_again(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model")
    made = published(model, tmp_path / "published")
    assert made is not None
    file = tmp_path / "published" / made.folder / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:10])
    published(model, tmp_path / "published")
    assert file.read_bytes() == whole


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_may_have_no_tokenizer(tmp_path: Path, family: str) -> None:
    assert published(build_tiny(family, tmp_path / "model"), tmp_path / "published") is None
