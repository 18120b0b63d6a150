"""Data of the examples: the official name of every character, from Python's `unicodedata`.

A question is `é = `, its answer `LATIN SMALL LETTER E WITH ACUTE` and the end of the line.
Neighbours have similar names, so a model can guess the names of unseen characters.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cotrain import Datum, ModelInput

FIRST, LAST = 0x00C0, 0x0600  # Latin, Greek, Cyrillic, Armenian, Hebrew
HOLDOUT = 64


@dataclass(frozen=True)
class Pair:
    """A question and its answer."""

    question: str
    answer: str


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs in a fixed random order; the first `HOLDOUT` are held out."""
    named = [chr(code) for code in range(FIRST, LAST) if unicodedata.name(chr(code), "")]
    random.Random(0).shuffle(named)
    return tuple(Pair(f"{char} = ", f"{unicodedata.name(char)}\n") for char in named)


def holdout() -> Sequence[Pair]:
    """Return the pairs that no example trains on."""
    return pairs()[:HOLDOUT]


def batch(step: int, rows: int = 32) -> Sequence[Pair]:
    """Return the pairs of a training step. The same step always returns the same pairs."""
    return random.Random(step).sample(pairs()[HOLDOUT:], rows)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Encode text without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def datums(tokenizer: Any, some: Iterable[Pair]) -> list[Datum]:
    """Make a datum of each pair: every token predicts the next, and only the answer has weights."""
    return [_datum(tokenizer, pair) for pair in some]


def _datum(tokenizer: Any, pair: Pair) -> Datum:
    question = tokens_of(tokenizer, pair.question)
    answer = tokens_of(tokenizer, pair.answer)
    tokens = question + answer
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0] * (len(question) - 1) + [1.0] * len(answer)},
    )
