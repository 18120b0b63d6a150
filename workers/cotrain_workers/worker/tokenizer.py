"""The base model's tokenizer: for stop strings here, and for the API's chat endpoints, which have no model.

Its folder is named after its content and never changes, so that a new worker disturbs no reader.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.decoding.requests import TextOf

log = structlog.get_logger()


@dataclass(frozen=True)
class PublishedTokenizer:
    """A tokenizer that the API can read."""

    folder: str
    """Its name among the published ones; empty for a kind that only Python can run."""
    text: TextOf


def publish_tokenizer(
    source: str, name: str, published: Path, *, local_files_only: bool
) -> PublishedTokenizer | None:
    """Write a base model's tokenizer where the API finds it; None for a model without one."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, local_files_only=local_files_only, trust_remote_code=False
        )
    except (OSError, ValueError) as missing:
        log.warning("no_tokenizer", source=source, reason=str(missing))
        return None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # What the library makes of a folder without one: it reads every text as no tokens at all.
        log.warning("no_tokenizer", source=source, reason="it has no vocabulary")
        return None

    def text(tokens: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return decoded

    return PublishedTokenizer(_publish(tokenizer, name, published), text)


def _publish(tokenizer: Any, name: str, published: Path) -> str:
    published.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(tempfile.mkdtemp(prefix=".", dir=published))
    try:
        tokenizer.save_pretrained(made)
        _name_for_every_version(made / "tokenizer_config.json")
        if not (made / "tokenizer.json").exists():
            return ""
        digest = _digest(made)
        folder = published / f"{name}-{digest}"
        if not folder.exists():
            made.rename(folder)
        elif _digest(folder) != digest:  # torn by a power cut
            shutil.rmtree(folder)
            made.rename(folder)
        return folder.name
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _name_for_every_version(config: Path) -> None:
    # Clients may have transformers 4, which does not know version 5's new name of the class.
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), "utf-8")


def _digest(folder: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:12]
