"""Codec for the body of a sample request, limits on its grammar, and encoder of its output.

In a body, settings are JSON, and long arrays are binary. A prompt of 32,000 tokens takes 128 KB and
is decoded in microseconds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from cotrain.wire.proto import wire_pb2
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
    target_prompt_logprobs: tuple[tuple[int, ...], ...] | None = None
    """Target tokens `[len(prompt) - 1, K]`; -1: skip."""
    stream: bool = False
    grammar: str | None = None
    """Grammar of the generated text, in the format of llguidance; None: any text."""
    return_routed_experts: bool = False
    images: tuple[BodyImage, ...] = ()
    """Images of the prompt, in order. The prompt has the model's placeholder within them."""
    policy_step: int | None = None
    """Step of the sampler's weights (`SamplerRecord.step`), for the policy spans of the result."""


class TopK(Protocol):
    """Likeliest k tokens at each of n positions, likeliest first."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n, k]."""

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n, k]."""


class SampledSequence(Protocol):
    """Continuation of the prompt."""

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]."""

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n], of the raw model."""

    @property
    def stop_reason(self) -> Literal["stop", "length"]:
        """Reason of the end."""

    @property
    def topk(self) -> TopK | None:
        """Likeliest tokens at each position; None if not requested."""

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Experts of the tokens before the last, integers [n - 1, layers, k]; None if not requested."""


class SampleOutput(Protocol):
    """Output of a decoder for one request with a prompt of P tokens."""

    @property
    def sequences(self) -> Sequence[SampledSequence]:
        """Continuations, in order."""

    @property
    def prompt_logprobs(self) -> np.ndarray | None:
        """float32 [P], NaN if not computed; None if not requested."""

    @property
    def topk_prompt(self) -> TopK | None:
        """Likeliest tokens [P, k]; None if not requested."""

    @property
    def target_prompt_logprobs(self) -> np.ndarray | None:
        """float32 [P - 1, K], NaN if skipped; None if not requested."""

    @property
    def cached_prompt_tokens(self) -> int:
        """Number of prompt tokens that were not computed for this request."""

    @property
    def prompt_routed_experts(self) -> np.ndarray | None:
        """Experts of the prompt, integers [P, layers, k]; None if not requested."""


def encode_sample(body: SampleBody) -> bytes:
    """Return a body as bytes. Equal bodies give equal bytes."""
    settings = asdict(replace(body, images=()))
    del settings["images"]
    if body.policy_step is None:  # as in bodies of earlier versions, which a client may repeat
        del settings["policy_step"]
    if body.images:
        settings["images"] = [(each.start, each.height, each.width, len(each.data)) for each in body.images]
    prompt = np.asarray(settings.pop("prompt"), "<i4")
    targets = settings.pop("target_prompt_logprobs")
    rows, columns = (len(targets), len(targets[0]) if targets else 0) if targets is not None else (0, 0)
    settings["has_targets"] = targets is not None
    text = json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()
    header = _HEADER.pack(len(text), prompt.size, rows, columns)
    arrays = prompt.tobytes() + np.asarray(targets or (), "<i8").tobytes()
    return b"".join((header, text, arrays, *(each.data for each in body.images)))


def decode_sample(body: bytes) -> SampleBody:
    """Return the body that `encode_sample` of this version, or of the next, has encoded. Raises MalformedBody for other bytes."""
    try:
        length, tokens, rows, columns = _HEADER.unpack_from(body)
        start = _HEADER.size + length
        settings = json.loads(body[_HEADER.size : start])
        prompt = np.frombuffer(body, "<i4", tokens, start)
        targets = np.frombuffer(body, "<i8", rows * columns, start + 4 * tokens)
        has_targets, stop = settings.pop("has_targets"), settings.pop("stop")
        settings["prompt"] = tuple(prompt.tolist())
        rest = body[start + 4 * tokens + 8 * rows * columns :]
        settings["images"] = tuple(_images(settings.get("images", ()), rest))
        settings["stop"] = None if stop is None else tuple(stop)
        settings["target_prompt_logprobs"] = (
            tuple(map(tuple, targets.reshape(rows, columns).tolist())) if has_targets else None
        )
        return decode(SampleBody, settings)
    except (struct.error, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as broken:
        raise MalformedBody("The body of a sample request cannot be read.") from broken


def _images(spans: Iterable[Sequence[int]], data: bytes) -> Iterator[BodyImage]:
    for start, height, width, size in spans:
        image, data = data[:size], data[size:]
        if len(image) != size:
            raise MalformedBody("An image of a sample request is cut.")
        yield BodyImage(start, height, width, image)


def encode_sample_output(output: SampleOutput, policy_run: str | None = None, policy_step: int | None = None) -> bytes:
    """Return an output as the wire's SampleResponse. Weights of `policy_run` at `policy_step` sampled all its tokens."""
    response = wire_pb2.SampleResponse(prompt_cache_hit_tokens=output.cached_prompt_tokens)
    for sequence in output.sequences:
        response.sequences.append(_sequence(sequence))
        response.sequences[-1].policy_spans.add(end=len(sequence.tokens), training_run_id=policy_run, step=policy_step)
    if output.prompt_logprobs is not None:
        response.prompt_logprobs = np.ascontiguousarray(output.prompt_logprobs, "<f4").tobytes()
    if output.topk_prompt is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(output.topk_prompt))
    if output.target_prompt_logprobs is not None:
        # The wire has 0 for skipped targets.
        targets = np.nan_to_num(np.ascontiguousarray(output.target_prompt_logprobs, "<f4"))
        response.target_prompt_logprobs.dtype = wire_pb2.DTYPE_FLOAT32
        response.target_prompt_logprobs.dense = targets.tobytes()
        response.target_prompt_logprobs.shape.extend(targets.shape)
    if output.prompt_routed_experts is not None:
        response.prompt_routed_experts.CopyFrom(_experts(output.prompt_routed_experts))
    return response.SerializeToString(deterministic=True)


def _sequence(sequence: SampledSequence) -> wire_pb2.SampledSequence:
    return wire_pb2.SampledSequence(
        stop_reason=(wire_pb2.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire_pb2.STOP_REASON_LENGTH),
        tokens=np.ascontiguousarray(sequence.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _topk(sequence.topk),
        routed_experts=(None if sequence.routed_experts is None else _experts(sequence.routed_experts)),
    )


def _experts(chosen: np.ndarray) -> wire_pb2.Tensor:
    is_small = chosen.max(initial=0) <= np.iinfo(np.int8).max
    return wire_pb2.Tensor(
        dense=np.ascontiguousarray(chosen, "<i1" if is_small else "<i2").tobytes(),
        dtype=wire_pb2.DTYPE_INT8 if is_small else wire_pb2.DTYPE_INT16,
        shape=chosen.shape,
    )


def _topk(topk: TopK) -> wire_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire_pb2.TopkLogprobs(
        token_ids=np.ascontiguousarray(topk.token_ids, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(topk.logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )


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
