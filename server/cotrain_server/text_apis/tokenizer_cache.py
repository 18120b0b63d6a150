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
from cotrain_store.blobs.folder import Folder
from cotrain_store.blobs.protocol import BlobsUnavailable
from cotrain_store.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_server.settings import ServerSettings
    from cotrain_store.blobs.protocol import Blobs
    from cotrain_store.messages.pools import PoolRecord

log = structlog.get_logger()

_READ_FIRST = "tokenizer.json"
#: Languages kept in memory; one of a large vocabulary takes about 100 MB.
_KEPT = 8


@dataclass(frozen=True)
class Language:
    """How one base model reads and writes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


async def published_tokenizer(pool: PoolRecord, settings: ServerSettings) -> Path | None:
    """Find the folder that the pool's workers wrote; None where they had nothing to write.

    Raises:
        StoreUnavailable: the object store does not answer now.
    """
    if not pool.tokenizer:
        return None
    try:
        folder = await asyncio.to_thread(_folder, settings.blob_store, settings.data_dir, pool)
    except BlobsUnavailable as unavailable:
        raise StoreUnavailable("The tokenizer cannot be read now.") from unavailable
    if (folder / _READ_FIRST).exists():
        return folder.absolute()
    log.warning("tokenizer_missing", pool=pool.id, folder=str(folder))
    return None


def _folder(blobs: Blobs, data_dir: Path, pool: PoolRecord) -> Path:
    """Name a tokenizer's folder; of objects, make it of them: it is named after its content, and never changes."""
    if blobs.folder:
        return blobs.folder / "tokenizers" / pool.tokenizer
    of_pool, here = blobs.below(f"tokenizers/{pool.tokenizer}"), Folder(data_dir / "tokenizers")
    if not here.exists(f"{pool.tokenizer}/{_READ_FIRST}"):
        keys = sorted((blob.key for blob in of_pool.list()), key=lambda key: key == _READ_FIRST)
        for key in keys:  # the last one says that all are there
            here.put(f"{pool.tokenizer}/{key}", of_pool.get(key))
    return data_dir / "tokenizers" / pool.tokenizer


async def tokenizer_folder(pool: PoolRecord, settings: ServerSettings) -> Path:
    """Find the folder that the pool's workers wrote; raises Invalid where there is none, StoreUnavailable."""
    folder = await published_tokenizer(pool, settings)
    if folder is None:
        raise Invalid(
            f"{pool.base_model} has no tokenizer here, so it reads and writes token ids only."
        )
    return folder


async def language_of(pool: PoolRecord, settings: ServerSettings) -> Language:
    """Read what the pool's workers wrote down; raises Invalid where they had nothing to write, StoreUnavailable."""
    return await asyncio.to_thread(_current, await tokenizer_folder(pool, settings))


def _current(folder: Path) -> Language:
    # A worker that starts writes its pool's folder anew.
    return _read(folder, (folder / _READ_FIRST).stat().st_mtime_ns)


@lru_cache(maxsize=_KEPT)
def _read(folder: Path, written_at_ns: int) -> Language:
    try:
        template = ChatTemplate.load(folder)
    except TemplateSyntaxError as error:
        log.warning("chat_template_unusable", folder=str(folder), reason=str(error))
        template = None
    return Language(Tokenizer.load(folder), template)
