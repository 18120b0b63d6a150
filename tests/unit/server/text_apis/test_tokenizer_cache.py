"""A model's language is read once, and again when its worker has written it anew."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cotrain_server.errors import Invalid
from cotrain_server.routes.openai import tokens_of
from cotrain_server.text_apis.detokenizer import Tokenizer
from cotrain_server.text_apis.tokenizer_cache import language_of
from tests.support.http_api import POOL
from tests.support.talking import write_language

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_language_is_read_once_until_it_is_written_anew(tmp_path: Path) -> None:
    write_language(tmp_path)
    language = await language_of(POOL, tmp_path)
    assert await language_of(POOL, tmp_path) is language
    write_language(tmp_path, None)
    os.utime(tmp_path / "tokenizers" / POOL.tokenizer / "tokenizer.json", ns=(1, 1))
    renewed = await language_of(POOL, tmp_path)
    assert language.template is not None
    assert renewed.template is None


@pytest.mark.parametrize("folder", ["", "elsewhere"])
async def test_a_pool_that_wrote_none_has_none(tmp_path: Path, folder: str) -> None:
    with pytest.raises(Invalid, match="no tokenizer"):
        await language_of(replace(POOL, tokenizer=folder), tmp_path)


async def test_a_model_that_is_none_for_chats_says_so(tmp_path: Path) -> None:
    write_language(tmp_path, None)
    language = await language_of(POOL, tmp_path)
    with pytest.raises(Invalid, match="no chat template"):
        await language.chat_tokens([{"role": "user", "content": "Hi"}])


async def test_no_text_is_cut_on_the_loop_that_answers_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_language(tmp_path)
    language = await language_of(POOL, tmp_path)
    cut_by: list[threading.Thread] = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
        cut_by.append(threading.current_thread())
        return encode(tokenizer, text, special=special)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    await language.chat_tokens([{"role": "user", "content": "Hi"}])
    await tokens_of(language.tokenizer, "Hi")
    assert len(cut_by) == 2
    assert threading.current_thread() not in cut_by
