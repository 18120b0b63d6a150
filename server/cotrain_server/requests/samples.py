"""Conversion of asample requests to `SampleBody`, and its validation against the base model. Pure.

An invalid request is refused at once: it has no position in an order, so nothing waits for it. Error messages are for
the tenant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
from pydantic import ValidationError

from cotrain.wire.datums import EncodedTextChunk, ImageChunk, ModelInput, cannot_read
from cotrain.wire.sampling import SampleRequest
from cotrain.wire.tensors import TensorData
from cotrain_server.errors import Invalid, first_error
from cotrain_server.requests.images import SentImage
from cotrain_server.requests.pass_validation import expert_choices
from cotrain_store.bodies.sample_body import SampleBody, TargetTokens
from cotrain_store.messages.runs import PoolRecord

MAX_SAMPLES = 1_024
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_024
#: Total over all stop strings. A worker builds its matching tables from them between two tokens.
MAX_ALL_STOP_CHARACTERS = 4_096
#: Log-probs per position. A higher number costs bandwidth rather than computation.
MAX_TOPK = 128
#: Cells of `target_prompt_logprobs`, each of which returns one number.
MAX_TARGETS = 1 << 20
#: Log-probs of alternative tokens that one request may return in total, because a worker holds them all in memory.
MAX_TOPK_CELLS = 1 << 24
#: Experts of tokens that one request may return in total: 256 MB to 512 MB.
MAX_ROUTED_EXPERTS = 1 << 28
SKIPPED = -1
"""Value of a `target_prompt_logprobs` cell that requests nothing."""


@dataclass(frozen=True)
class ParsedSample:
    """A sample request with a known sampler and number."""

    sampler: str
    seq: int
    body: SampleBody  # without its images
    images: tuple[SentImage, ...] = ()


def read_sample(content: bytes) -> ParsedSample:
    """Parse an asample request as SDKs send it.

    Raises:
        Invalid: not valid JSON for it, without a sampler, or requesting an unsupported feature.
    """
    try:
        request = SampleRequest.model_validate_json(content)
    except ValidationError as error:
        raise Invalid(first_error(error)) from error
    if request.sampling_session_id is None or request.seq_id is None:
        raise Invalid(
            "sampling_session_id and seq_id are required. Create a sampler with create_sampling_session first."
        )
    if request.prompt_alt_tokens_k:
        raise Invalid("prompt_alt_tokens_k is not supported here.")
    if request.record_stability_info:
        raise Invalid(
            "record_stability_info is not supported here: it serves the loss stable_reinforce, whose "
            "formula is not published. Choose another loss_fn, such as importance_sampling."
        )
    body, images = _body(request), tuple(_images(request.prompt))
    return ParsedSample(request.sampling_session_id, request.seq_id, body, images)


def _body(request: SampleRequest) -> SampleBody:
    params = request.sampling_params
    return SampleBody(
        prompt=_tokens(request.prompt),
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop=_stop(params.stop),
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=_targets(request.target_prompt_logprobs),
        stream=False,
        return_routed_experts=request.return_routed_experts,
    )


def _tokens(prompt: ModelInput) -> tuple[int, ...]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            tokens += chunk.tokens
        elif not isinstance(chunk, ImageChunk):
            raise Invalid(f"prompt: {cannot_read(chunk)}.")
    return tuple(tokens)


def _images(prompt: ModelInput) -> Iterator[SentImage]:
    at = 0
    for number, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, EncodedTextChunk):
            at += len(chunk.tokens)
        elif isinstance(chunk, ImageChunk):
            yield SentImage(at, number, chunk.data, chunk.format, chunk.expected_tokens)


def _stop(stop: str | list[str] | list[int] | None) -> tuple[str, ...] | tuple[int, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)  # type: ignore[return-value]  # one type or the other, never mixed


def _targets(tensor: TensorData | None) -> TargetTokens | None:
    """Return a matrix of token ids. Cells missing from a sparse matrix request nothing, like -1."""
    if tensor is None:
        return None
    shape = tensor.dense_shape
    if tensor.dtype != "int64" or len(shape) != 2 or shape[1] < 1:
        raise Invalid(
            f"target_prompt_logprobs must be int64 of shape [len(prompt) - 1, K], not {tensor.dtype} of shape {shape}."
        )
    if prod(shape) > MAX_TARGETS:
        raise Invalid(f"target_prompt_logprobs may have at most {MAX_TARGETS} cells.")
    ids = np.array(tensor.data, np.int64)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        return TargetTokens.of(ids.reshape(shape))
    filled = np.full(shape, SKIPPED, np.int64)
    rows = np.repeat(np.arange(shape[0]), np.diff(tensor.sparse_crow_indices))
    filled[rows, np.array(tensor.sparse_col_indices, np.int64)] = ids
    return TargetTokens.of(filled)


def check_sample(body: SampleBody, pool: PoolRecord) -> None:
    """Check a sample request against its base model.

    Raises:
        Invalid: the message names the field and its limit.
    """
    check_sampleable(pool)
    _check_prompt(body, pool)
    _check_range("num_samples", body.num_samples, 1, MAX_SAMPLES)
    if body.max_tokens is not None:
        _check_range("max_tokens", body.max_tokens, 0, MAX_TOKENS)
    _check_distribution(body, pool)
    _check_stop(body.stop, pool)
    _check_logprobs(body, pool)


def check_sampleable(pool: PoolRecord) -> None:
    """Raise Invalid if no worker samples from this base model."""
    if not is_sampleable(pool):
        raise Invalid(f"{pool.base_model} cannot be sampled from here.")


def is_sampleable(pool: PoolRecord) -> bool:
    """Return True if the workers of a pool can sample."""
    return pool.max_sequence_tokens > 0


def _check_prompt(body: SampleBody, pool: PoolRecord) -> None:
    length, limit = len(body.prompt), pool.max_sequence_tokens
    if not 1 <= length <= limit:
        raise Invalid(f"prompt has {length} tokens; {pool.base_model} samples from prompts of 1 to {limit}.")
    _check_tokens("prompt", body.prompt, pool.vocab_size)


def _check_distribution(body: SampleBody, pool: PoolRecord) -> None:
    if not (isfinite(body.temperature) and body.temperature >= 0):
        raise Invalid("temperature must be a finite number, 0 or more.")
    if not 0 < body.top_p <= 1:
        raise Invalid("top_p must be greater than 0 and at most 1.")
    if body.top_k != -1 and not 1 <= body.top_k <= pool.vocab_size:
        raise Invalid(f"top_k must be between 1 and {pool.vocab_size}, the size of the vocabulary, or -1 for no limit.")
    if body.seed is not None:
        _check_range("seed", body.seed, -(2**63), 2**64 - 1)


def _check_stop(stop: tuple[str, ...] | tuple[int, ...] | None, pool: PoolRecord) -> None:
    if not stop:
        return
    if len(stop) > MAX_STOPS:
        raise Invalid(f"stop has {len(stop)} entries; the limit is {MAX_STOPS}.")
    texts = [entry for entry in stop if isinstance(entry, str)]
    if not texts:
        _check_tokens("stop", [entry for entry in stop if isinstance(entry, int)], pool.vocab_size)
        return
    if not pool.tokenizer:
        raise Invalid(f"stop: {pool.base_model} has no tokenizer here, so it cannot stop at text; send token ids.")
    if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise Invalid(f"stop: each string must have 1 to {MAX_STOP_CHARACTERS} characters.")
    if sum(map(len, texts)) > MAX_ALL_STOP_CHARACTERS:
        raise Invalid(
            f"stop: the strings have {sum(map(len, texts))} characters together. The limit is "
            f"{MAX_ALL_STOP_CHARACTERS}."
        )


def _check_logprobs(body: SampleBody, pool: PoolRecord) -> None:
    limit = min(MAX_TOPK, pool.vocab_size)
    _check_range("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, limit)
    _check_range("topk_sample_logprobs", body.topk_sample_logprobs, 0, limit)
    _check_answer(body, pool)
    last_n, positions = body.prompt_logprobs_last_n, len(body.prompt) - 1
    if last_n is not None:
        if not body.prompt_logprobs:
            raise Invalid("prompt_logprobs_last_n needs prompt_logprobs.")
        if not 1 <= last_n <= positions:
            raise Invalid(
                f"prompt_logprobs_last_n must be between 1 and {positions}, one less than the prompt has tokens."
            )
    if body.target_prompt_logprobs is not None:
        _check_targets(body.target_prompt_logprobs, positions, pool.vocab_size)
    if body.return_routed_experts:
        _check_routed_experts(body, pool)


def _check_routed_experts(body: SampleBody, pool: PoolRecord) -> None:
    layers, chosen, _ = expert_choices(pool, "return_routed_experts")
    if pool.sampler == "vllm":
        raise Invalid("return_routed_experts needs the sampler of the engine, not vLLM.")
    cells = (len(body.prompt) + body.num_samples * _most_tokens(body, pool)) * layers * chosen
    if cells > MAX_ROUTED_EXPERTS:
        raise Invalid(
            f"return_routed_experts: {body.num_samples} samples of up to {_most_tokens(body, pool)} tokens have {cells} "
            f"experts. The limit is {MAX_ROUTED_EXPERTS}. Ask for fewer samples or a smaller max_tokens."
        )


def _most_tokens(body: SampleBody, pool: PoolRecord) -> int:
    left_tokens = pool.max_sequence_tokens - len(body.prompt)
    return left_tokens if body.max_tokens is None else min(left_tokens, body.max_tokens)


def _check_answer(body: SampleBody, pool: PoolRecord) -> None:
    tokens = _most_tokens(body, pool)
    cells = body.num_samples * tokens * body.topk_sample_logprobs
    if cells > MAX_TOPK_CELLS:
        raise Invalid(
            f"topk_sample_logprobs: {body.num_samples} samples of up to {tokens} tokens with "
            f"{body.topk_sample_logprobs} each are {cells} log-probs; at most {MAX_TOPK_CELLS} are "
            "taken. Ask for fewer samples, a smaller max_tokens, or fewer log-probs."
        )


def _check_targets(targets: TargetTokens, positions: int, vocab_size: int) -> None:
    if targets.rows != positions:
        raise Invalid(
            f"target_prompt_logprobs has {targets.rows} rows; the prompt has {positions} tokens after its first."
        )
    ids = targets.matrix
    bad = (ids < 0) & (ids != SKIPPED) | (ids >= vocab_size)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise Invalid(
            f"target_prompt_logprobs[{row}, {column}] is {ids[row, column]}, which is outside the "
            f"vocabulary (0..{vocab_size - 1}) and not {SKIPPED}."
        )


def _check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise Invalid(f"{name} must be between {minimum} and {maximum}.")


def _check_tokens(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise Invalid(f"{name}: token id {ids[index]} at position {index} is outside the vocabulary (0..{vocab_size - 1}).")
