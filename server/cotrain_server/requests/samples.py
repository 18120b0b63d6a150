"""Conversion of asample requests to `SampleBody`. Pure: bytes in, `SampleBody` out.

`sample_validation` checks the content against the base model. This module checks only constraints
that the wire models leave open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from pydantic import ValidationError

from cotrain.wire.datums import EncodedTextChunk, ImageChunk, ModelInput, cannot_read
from cotrain.wire.sampling import SampleRequest
from cotrain.wire.tensors import TensorData
from cotrain_server.errors import Invalid, sentence
from cotrain_server.requests.images import SentImage
from cotrain_server.requests.sample_validation import MAX_TARGETS, SKIPPED
from cotrain_store.bodies.sample_body import SampleBody


@dataclass(frozen=True)
class AddressedSample:
    """A sample request with a known sampler and number."""

    sampler: str
    seq: int
    body: SampleBody  # without its images
    images: tuple[SentImage, ...] = ()


def read_sample(content: bytes) -> AddressedSample:
    """Parse an asample request as SDKs send it.

    Raises:
        Invalid: not valid JSON for it, without a sampler, or requesting an unsupported feature.
    """
    try:
        request = SampleRequest.model_validate_json(content)
    except ValidationError as error:
        raise Invalid(sentence(error.errors(include_url=False, include_input=False))) from error
    if request.sampling_session_id is None or request.seq_id is None:
        raise Invalid(
            "sampling_session_id and seq_id are required. Create a sampler with create_sampling_session first."
        )
    _refuse_unsupported(request)
    body, images = _body(request), tuple(_images(request.prompt))
    return AddressedSample(request.sampling_session_id, request.seq_id, body, images)


def _refuse_unsupported(request: SampleRequest) -> None:
    if request.prompt_alt_tokens_k:
        raise Invalid("prompt_alt_tokens_k is not supported here.")
    if request.record_stability_info:
        raise Invalid(
            "record_stability_info is not supported here: it serves the loss stable_reinforce, whose "
            "formula is not published. Choose another loss_fn, such as importance_sampling."
        )


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


def _targets(tensor: TensorData | None) -> tuple[tuple[int, ...], ...] | None:
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
    ids = [int(token) for token in tensor.data]
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        return _rows(ids, width=shape[1])
    filled = [SKIPPED] * prod(shape)
    for row, (start, end) in enumerate(pairwise(tensor.sparse_crow_indices)):
        for listed in range(start, end):
            filled[row * shape[1] + tensor.sparse_col_indices[listed]] = ids[listed]
    return _rows(filled, width=shape[1])


def _rows(cells: list[int], width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(cells[start : start + width]) for start in range(0, len(cells), width))
