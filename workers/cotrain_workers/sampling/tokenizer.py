"""Tokenizer of the base model: text for stop strings, grammars, and its files for the API's chat endpoints.

It is published for the API, which has no model. The folder is named after its content and never
changes, so a new worker does not disturb readers.

A grammar is text in the format of llguidance (Lark with JSON schemas). It is compiled here for the tokenizer's
vocabulary. The API compiles each one before it accepts the request, with the same limits.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from transformers import AutoTokenizer
from typing_extensions import override

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.bodies.sample_body import grammar_limits
from cotrain_workers.engine.decoding.requests import Grammar, GrammarOf, GrammarUnusable, TextOf

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


log = structlog.get_logger()

#: File that the API reads. Its presence marks a complete folder.
READ_BY_API = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
#: Number of compiled grammars in memory. A client usually sends one many times.
MAX_COMPILED = 32


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


class Grammars:
    """Compiler of grammars for one tokenizer. The vocabulary is read at the first grammar."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocabulary = lru_cache(maxsize=2)(self._read_vocabulary)
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def __call__(self, grammar: str, vocab_size: int, final: frozenset[int]) -> Grammar:
        """Return the start of a grammar over tokens below `vocab_size`. `final` tokens may follow its end.

        Raises:
            GrammarUnusable: it is invalid or exceeds the limits.
        """
        return _Matched(self._compiled(grammar, vocab_size, final).deep_copy(), vocab_size)

    def _compile(self, grammar: str, vocab_size: int, final: frozenset[int]) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary, text = self._vocabulary(vocab_size, final), LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=grammar_limits())
        start = matcher.deep_copy()
        start.compute_bitmask()  # an error if no text fits
        if start.is_error():
            raise GrammarUnusable(start.get_error().splitlines()[0])
        return matcher

    def _read_vocabulary(self, vocab_size: int, final: frozenset[int]) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer_json, n_vocab=vocab_size, eos_token=sorted(final))


class _Matched(Grammar):
    """Position of one sequence in a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @override
    def allowed(self) -> np.ndarray:
        """Return the tokens that may follow: bool `[V]`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    @override
    def advance(self, token: int) -> bool:
        """Read a token. Return False if the grammar has no continuation."""
        return bool(self._matcher.consume_token(token)) and (
            not self._matcher.is_stopped() or self._matcher.is_accepting()
        )

    @property
    @override
    def failure(self) -> str:
        """Reason why the grammar has no continuation: a limit of a step, or no text at all."""
        if not self._matcher.is_error():
            return "no text fits the schema"
        reason = self._matcher.get_error().splitlines()[0][:200]
        return f"the schema is too complex for the text so far: {reason}"
