from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from cotrain.errors import TokenizerMissing
from cotrain.tokenizer import load_tokenizer, tokenizer_name
from tests.support.tiny_models import build_tiny_qwen3

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_folder_is_a_tokenizer_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert tokenizer_name(str(folder)) == str(folder)


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path: Path) -> None:
    folder = build_tiny_qwen3(tmp_path / "tiny")
    assert load_tokenizer(str(folder)).encode("def")
    assert load_tokenizer("some name", tokenizer_id=str(folder)).encode("def")


def test_a_tokenizer_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=f"no tokenizer '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerMissing, match="pip install transformers"):
        load_tokenizer("m")
