"""Tokenizers and chat templates that the workers of a pool publish, read once per process."""

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import structlog
from jinja2 import TemplateSyntaxError

from cotrain_server.errors import Invalid
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis.chat_template import ChatTemplate
from cotrain_server.text_apis.tokenizer import TOKENIZER_FILE, Tokenizer
from cotrain_store.blobs.folder import Folder
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.errors import StoreUnavailable
from cotrain_store.messages.runs import PoolRecord

log = structlog.get_logger()

#: Number of cached languages. One with a large vocabulary takes about 100 MB.
_MAX_CACHED = 8


@dataclass(frozen=True)
class Language:
    """Tokenizer and chat template of one base model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


async def published_tokenizer(pool: PoolRecord, settings: ServerSettings) -> Path | None:
    """Return the folder that the pool's workers published, or None if they had no tokenizer. Raises StoreUnavailable:
    the object store does not answer now.
    """
    if not pool.tokenizer:
        return None
    try:
        folder = await asyncio.to_thread(_folder, settings.blob_store, settings.data_dir, pool)
    except BlobsUnavailable as unavailable:
        raise StoreUnavailable("The tokenizer cannot be read now.") from unavailable
    if (folder / TOKENIZER_FILE).exists():
        return folder.absolute()
    log.warning("tokenizer_missing", pool=pool.id, folder=str(folder))
    return None


def _folder(blobs: Blobs, data_dir: Path, pool: PoolRecord) -> Path:
    """Return a tokenizer's local folder, after a download if there is an object store.

    Its name is a content hash, so it never changes.
    """
    if blobs.folder:
        return blobs.folder / "tokenizers" / pool.tokenizer
    of_pool, here = blobs.below(f"tokenizers/{pool.tokenizer}"), Folder(data_dir / "tokenizers")
    if not here.exists(f"{pool.tokenizer}/{TOKENIZER_FILE}"):
        keys = sorted((blob.key for blob in of_pool.list()), key=lambda key: key == TOKENIZER_FILE)
        for key in keys:  # the tokenizer comes last, and marks the folder as complete
            here.put(f"{pool.tokenizer}/{key}", of_pool.get(key))
    return data_dir / "tokenizers" / pool.tokenizer


async def tokenizer_folder(pool: PoolRecord, settings: ServerSettings) -> Path:
    """Return the folder of `published_tokenizer`. Raises Invalid if there is none, and StoreUnavailable."""
    folder = await published_tokenizer(pool, settings)
    if folder is None:
        raise Invalid(f"{pool.base_model} has no tokenizer here, so it reads and writes token ids only.")
    return folder


async def language_of(pool: PoolRecord, settings: ServerSettings) -> Language:
    """Return the tokenizer and chat template of a pool. Raises Invalid if there is no tokenizer, and StoreUnavailable."""
    return await asyncio.to_thread(_current, await tokenizer_folder(pool, settings))


def _current(folder: Path) -> Language:
    # A worker that starts rewrites its pool's folder, so the time is part of the cache key.
    return _read(folder, (folder / TOKENIZER_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=_MAX_CACHED)
def _read(folder: Path, written_at_ns: int) -> Language:
    try:
        template = ChatTemplate.load(folder)
    except TemplateSyntaxError as error:
        log.warning("chat_template_unusable", folder=str(folder), reason=str(error))
        template = None
    return Language(Tokenizer.load(folder), template)
