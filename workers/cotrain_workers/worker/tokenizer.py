"""Tokenizer of the base model, for stop strings here and for the API's chat endpoints.

It is published for the API, which has no model. The folder is named after its content and never
changes, so a new worker does not disturb readers.
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from transformers import AutoTokenizer

from cotrain_store.blobs.protocol import Blobs
from cotrain_workers.engine.decoding.requests import GrammarOf, TextOf
from cotrain_workers.sampling.grammars import Grammars

log = structlog.get_logger()

#: File that the API reads. Its presence marks a complete folder.
READ_BY_API = "tokenizer.json"
_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class PublishedTokenizer:
    """Tokenizer that the API can read."""

    folder: str  # name of the published folder; empty for a kind that only Python can run
    text: TextOf
    grammar_of: GrammarOf | None  # compiler of grammars; None for a kind that only Python can run


def publish_tokenizer(source: str, name: str, published: Blobs, *, local_files_only: bool) -> PublishedTokenizer | None:
    """Publish a base model's tokenizer for the API. Return None for a model without one."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, local_files_only=local_files_only, trust_remote_code=False
        )
    except (OSError, ValueError) as missing:
        log.warning("no_tokenizer", source=source, reason=str(missing))
        return None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # The library returns such a tokenizer for a folder without one: it encodes every text as
        # no tokens.
        log.warning("no_tokenizer", source=source, reason="it has no vocabulary")
        return None

    def text(tokens: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return decoded

    folder = _publish(tokenizer, name, published)
    grammar_of = Grammars(tokenizer.backend_tokenizer.to_str()) if folder else None
    return PublishedTokenizer(folder, text, grammar_of)


def _publish(tokenizer: Any, name: str, published: Blobs) -> str:
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save_pretrained(made)
        contents = {path.name: path.read_bytes() for path in sorted(Path(made).iterdir())}
    if READ_BY_API not in contents:
        return ""
    contents[_CONFIG] = _named_for_every_version(contents[_CONFIG])
    digest = _digest(contents)
    folder = f"{name}-{digest}"
    if _digest(_published(published, folder)) != digest:  # missing, or torn by a power cut
        for file in sorted(contents, key=lambda file: file == READ_BY_API):  # last: then it is whole
            published.put(f"{folder}/{file}", contents[file])
    return folder


def _published(published: Blobs, folder: str) -> dict[str, bytes]:
    found = [blob for blob in published.list(folder) if not blob.is_unfinished]
    return {blob.key.rpartition("/")[2]: published.get(blob.key) for blob in found}


def _named_for_every_version(config: bytes) -> bytes:
    # Clients may have transformers 4, which lacks version 5's name of the class.
    return config.replace(b'"TokenizersBackend"', b'"PreTrainedTokenizerFast"')


def _digest(contents: Mapping[str, bytes]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(contents):
        hasher.update(name.encode() + b"\0" + contents[name])
    return hasher.hexdigest()[:12]
