"""Grammars that hold generated text, compiled by llguidance for one vocabulary.

A grammar is text in the format of llguidance (Lark with JSON schemas). The API compiles each one
before it accepts the request, with the same limits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from cotrain_store.bodies.sample_body import grammar_limits
from cotrain_workers.engine.decoding.requests import Grammar, GrammarUnusable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Number of compiled grammars in memory. A client usually sends one many times.
MAX_COMPILED = 32


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
