"""Limits on grammars of generated text, for the API that accepts them and the workers that use them.

A grammar within these limits compiles within a second (the API refuses it above 0.1 s), and takes at most some 20 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

#: Maximum length of a grammar in characters.
MAX_GRAMMAR_CHARACTERS = 64 * 1024


def grammar_limits() -> LLParserLimits:
    """Return the limits on compilation and on each step. The defaults allow five times as much."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
