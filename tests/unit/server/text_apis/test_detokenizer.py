"""Text grows with its tokens, never shows half a character, and ends at a stop string."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from cotrain_server.errors import Unreadable
from cotrain_server.text_apis.detokenizer import PARTIAL, TextGrowth, Tokenizer, VisibleText
from tests.support.tiny_models import trained_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCAB = 512
EOS = 2
WORDS = "Grüße 🙂 漢字 👩‍👩‍👧 def f(x):\n    return x  # ok"

tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained_tokenizer(VOCAB)))
bytes_only = tokenizers.Tokenizer(
    models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
)
bytes_only.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def texts_of(tokens: Sequence[int], size: int) -> list[str]:
    growth = TextGrowth(tokenizer)
    texts = [growth.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return [*texts, growth.finish()]


@given(tokens, st.integers(1, 5))
def test_chunks_add_up_to_the_whole_text(tokens: list[int], size: int) -> None:
    assert "".join(texts_of(tokens, size)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", [WORDS, WORDS * 20])
def test_a_character_of_many_tokens_comes_whole(text: str) -> None:
    texts = texts_of(tokenizer.encode(text, special=False), 1)
    assert not any(PARTIAL in each for each in texts)
    assert "".join(texts) == text
    assert sum(map(bool, texts)) > 10


def test_bytes_of_a_fallback_vocabulary_come_as_characters() -> None:
    growth = TextGrowth(Tokenizer(bytes_only))
    texts = [growth.push([byte]) for byte in "aé🙂b".encode()]
    assert texts == ["a", "", "é", "", "", "", "🙂", "b"]


def test_bytes_that_never_become_a_character_do_not_wait_without_end() -> None:
    (stray,) = tokenizer.encode("é", special=False)[-1:]
    growth = TextGrowth(tokenizer)
    text = "".join(growth.push([stray]) for _ in range(100))
    assert len(text) > 60
    assert len(text + growth.finish()) == 100


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    stop = "f(x):\n"
    assert len(tokenizer.encode(stop, special=False)) > 2
    visible = VisibleText(tokenizer, ["END", stop], [EOS])
    shown = [visible.push([token]) for token in tokenizer.encode(WORDS, special=False)]
    assert "".join(shown) + visible.finish() == WORDS[: WORDS.index(stop)]
    assert visible.stopped_by == stop


def test_the_first_of_two_stop_strings_ends_the_text() -> None:
    visible = VisibleText(tokenizer, ["b", "a b"], [])
    assert visible.push(tokenizer.encode("x a b", special=False)) == "x "
    assert visible.stopped_by == "a b"
    assert visible.push([5]) + visible.finish() == ""


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    visible = VisibleText(tokenizer, ["END."], [])
    shown = visible.push(tokenizer.encode("THE END", special=False))
    assert shown == "THE "
    assert visible.finish() == "END"
    assert visible.stopped_by is None


def test_a_final_token_has_no_text() -> None:
    (letter,) = tokenizer.encode("a", special=False)
    visible = VisibleText(tokenizer, [], [letter])
    assert visible.push(tokenizer.encode("xa", special=False)) + visible.finish() == "x"


def test_half_a_character_is_refused() -> None:
    with pytest.raises(Unreadable, match="half a character"):
        tokenizer.encode(json.loads('"\\ud83d"'), special=False)


def test_settings_of_the_file_that_would_cut_or_fill_prompts_are_ignored(tmp_path: Path) -> None:
    vocabulary = tokenizers.Tokenizer.from_str(trained_tokenizer(VOCAB))
    vocabulary.enable_truncation(3)
    vocabulary.enable_padding(length=500)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(WORDS, special=True) == tokenizer.encode(
        WORDS, special=True
    )
