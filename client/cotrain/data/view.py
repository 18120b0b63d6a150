"""View of a datum: its text, with the parts that are trained on."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from cotrain.wire.datums import Datum

OPEN, CLOSE = "⟦", "⟧"


def marked(datum: Datum, tokenizer: Any) -> str:
    """Return the text of a datum with ⟦brackets⟧ around the trained parts.

    Another weight than 1 follows its opening bracket, as in `⟦0.1: text⟧`.
    """
    return "".join(
        text if not weight else f"{OPEN}{'' if weight == 1 else f'{weight:g}: '}{text}{CLOSE}"
        for text, weight in parts(datum, tokenizer)
    )


def parts(datum: Datum, tokenizer: Any) -> Iterator[tuple[str, float]]:
    """Yield texts with the weight of their tokens. The first token is no target, so its weight is 0."""
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.to_ints()[:1], *map(int, inputs["target_tokens"].data)]
    weights = [0.0, *map(float, inputs["weights"].data)]
    for weight, group in groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1]):
        yield tokenizer.decode([token for token, _ in group]), weight
