"""Codec for the body of a sample request, limits on its grammar, and encoder of its output.

In a body, settings are JSON, and long arrays are binary. A prompt of 32,000 tokens takes 128 KB and
is decoded in microseconds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cotrain_store.bodies.images import BodyImage
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import decode

if TYPE_CHECKING:  # imported by the processes that compile a grammar
    from llguidance import LLParserLimits

#: Bytes of the JSON part, tokens of the prompt, rows and columns of the targets.
_HEADER = struct.Struct("<4I")
#: Maximum length of a grammar in characters.
MAX_GRAMMAR_CHARACTERS = 64 * 1024


@dataclass(frozen=True)
class TargetTokens:
    """Target tokens `[len(prompt) - 1, K]`; -1: skip. No list, because 300 bytes can name a million of them."""

    rows: int
    columns: int
    data: bytes

    @classmethod
    def of(cls, matrix: Any) -> Self:
        """Return the tokens of a matrix, which is an array or has tuples as rows."""
        array = np.asarray(matrix, "<i8")
        return cls(len(array), array.shape[1] if array.size else 0, array.tobytes())

    @property
    def matrix(self) -> np.ndarray:
        """The tokens as an array."""
        return np.frombuffer(self.data, "<i8").reshape(self.rows, self.columns)


@dataclass(frozen=True)
class SampleBody:
    """Decoded sample request, with all defaults filled in."""

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None  # maximum number of tokens; None: as many as the context holds
    temperature: float
    top_k: int  # number of likeliest tokens to sample from; -1: off
    top_p: float
    seed: int | None
    """Random seed; None: derived from the request id, so that a re-run gives the same tokens."""
    stop: tuple[str, ...] | tuple[int, ...] | None
    """Stop strings or tokens, in addition to end-of-sequence tokens. None: only those; (): no stop at all."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TargetTokens | None = None
    stream: bool = False
    grammar: str | None = None
    """Grammar of the generated text, in the format of llguidance; None: any text."""
    return_routed_experts: bool = False
    images: tuple[BodyImage, ...] = ()
    """Images of the prompt, in order. The prompt has the model's placeholder within them."""
    policy_step: int | None = None
    """Step of the sampler's weights (`SamplerRecord.step`), for the policy spans of the result."""


def encode_sample(body: SampleBody) -> bytes:
    """Return a body as bytes. Equal bodies give equal bytes."""
    prompt, targets = np.asarray(body.prompt, "<i4"), body.target_prompt_logprobs
    settings = asdict(replace(body, prompt=(), target_prompt_logprobs=None, images=()))
    for name in ("prompt", "target_prompt_logprobs", "images"):
        del settings[name]
    if body.images:
        settings["images"] = [(each.start, each.height, each.width, len(each.data)) for each in body.images]
    settings["has_targets"] = targets is not None
    text = json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()
    targets = targets or TargetTokens(0, 0, b"")
    header = _HEADER.pack(len(text), prompt.size, targets.rows, targets.columns)
    return b"".join((header, text, prompt.tobytes(), targets.data, *(each.data for each in body.images)))


def decode_sample(body: bytes) -> SampleBody:
    """Return the body that `encode_sample` of this version, or of the next, has encoded. Raises MalformedBody for other bytes."""
    try:
        length, tokens, rows, columns = _HEADER.unpack_from(body)
        start = _HEADER.size + length
        settings = json.loads(body[_HEADER.size : start])
        prompt = np.frombuffer(body, "<i4", tokens, start)
        targets = np.frombuffer(body, "<i8", rows * columns, start + 4 * tokens).tobytes()
        has_targets, stop = settings.pop("has_targets"), settings.pop("stop")
        settings["prompt"] = tuple(prompt.tolist())
        rest = body[start + 4 * tokens + 8 * rows * columns :]
        settings["images"] = tuple(_images(settings.get("images", ()), rest))
        settings["stop"] = None if stop is None else tuple(stop)
        settings["target_prompt_logprobs"] = TargetTokens(rows, columns, targets) if has_targets else None
        return decode(SampleBody, settings)
    except (struct.error, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as broken:
        raise MalformedBody("The body of a sample request cannot be read.") from broken


def _images(spans: Iterable[Sequence[int]], data: bytes) -> Iterator[BodyImage]:
    for start, height, width, size in spans:
        image, data = data[:size], data[size:]
        if len(image) != size:
            raise MalformedBody("An image of a sample request is cut.")
        yield BodyImage(start, height, width, image)


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
