"""What it takes to talk with a base model: its tokenizer and chat template, read once per process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import structlog
from jinja2 import TemplateSyntaxError

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.chat_template import ChatTemplate
from cotrain_server.text_apis.detokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_store.messages.pools import PoolRecord

log = structlog.get_logger()

#: Languages kept in memory; one of a large vocabulary takes about 100 MB.
_KEPT = 8


@dataclass(frozen=True)
class Language:
    """How one base model reads and writes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def published_tokenizer(pool: PoolRecord, data_dir: Path) -> Path | None:
    """Find the folder that the pool's workers wrote; None where they had nothing to write."""
    folder = data_dir / "tokenizers" / pool.tokenizer
    if pool.tokenizer and (folder / "tokenizer.json").exists():
        return folder.absolute()
    if pool.tokenizer:
        log.warning("tokenizer_missing", pool=pool.id, folder=str(folder))
    return None


def tokenizer_folder(pool: PoolRecord, data_dir: Path) -> Path:
    """Find the folder that the pool's workers wrote; raises Invalid where there is none."""
    folder = published_tokenizer(pool, data_dir)
    if folder is None:
        raise Invalid(
            f"{pool.base_model} has no tokenizer here, so it reads and writes token ids only."
        )
    return folder


async def language_of(pool: PoolRecord, data_dir: Path) -> Language:
    """Read what the pool's workers wrote down; raises Invalid where they had nothing to write."""
    return await asyncio.to_thread(_current, tokenizer_folder(pool, data_dir))


def _current(folder: Path) -> Language:
    # A worker that starts writes its pool's folder anew.
    return _read(folder, (folder / "tokenizer.json").stat().st_mtime_ns)


@lru_cache(maxsize=_KEPT)
def _read(folder: Path, written_at_ns: int) -> Language:
    try:
        template = ChatTemplate.load(folder)
    except TemplateSyntaxError as error:
        log.warning("chat_template_unusable", folder=str(folder), reason=str(error))
        template = None
    return Language(Tokenizer.load(folder), template)
