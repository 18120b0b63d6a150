"""A model's language is read once, and again when its worker has written it anew."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cotrain_server.errors import Invalid
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis.tokenizer_cache import language_of
from tests.support.http_api import POOL
from tests.support.talking import write_language

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_language_is_read_once_until_it_is_written_anew(tmp_path: Path) -> None:
    write_language(tmp_path)
    language = await language_of(
        POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)
    )
    assert (
        await language_of(POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path))
        is language
    )
    write_language(tmp_path, None)
    os.utime(tmp_path / "tokenizers" / POOL.tokenizer / "tokenizer.json", ns=(1, 1))
    renewed = await language_of(
        POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)
    )
    assert language.template is not None
    assert renewed.template is None


@pytest.mark.parametrize("folder", ["", "elsewhere"])
async def test_a_pool_that_wrote_none_has_none(tmp_path: Path, folder: str) -> None:
    with pytest.raises(Invalid, match="no tokenizer"):
        await language_of(
            replace(POOL, tokenizer=folder),
            ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path),
        )
