"""The JSON shapes of sampling, in the order a sampler meets them.

The limits here are those of the shapes; what a base model, a prompt or a tenant bounds, the server
checks. `cotrain.types` names them all.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cotrain.wire.datums import ModelInput, Token
from cotrain.wire.model import Argument, Listed, Name, SequencedRequest, WireModel
from cotrain.wire.tensors import TensorData, read_numbers

MAX_RETRIEVED = 10_000
"""Results that one poll may say have arrived; SDK 0.38 has 2,000 requests on their way at most."""

CLONE_SEQ_IDS = 10**9
"""Clone k of a sampling client, made by unpickling it, numbers its requests from k times this."""

SamplingSessionSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
SampleSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Names a sample request within its sampler; says nothing of an order."""
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[int, Field(ge=1, lt=2**40)]
LogProb = Annotated[float, Field(allow_inf_nan=True)]
TopK = list[tuple[int, LogProb]]
"""The likeliest tokens of one position with their log-probs, likeliest first."""


# ---- Sampler -------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(WireModel):
    """POST create_sampling_session: make a sampler of a base model or of saved weights."""

    session_id: Name
    sampling_session_seq_id: SamplingSessionSeqId
    """One counter of the session, shared with `SaveWeightsForSamplerRequest`."""
    base_model: Name | None = None
    model_path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """`tinker://<run>/sampler_weights/<name>`; wins over `base_model`."""
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(WireModel):
    """The sampler's id."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class GetSamplerResponse(WireModel):
    """GET samplers/{id}: what a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class SaveWeightsForSamplerRequest(SequencedRequest):
    """POST save_weights_for_sampler: keep the run's weights as they are after the requests before.

    Under a name (`path`), or as a sampler of their own (`sampling_session_seq_id`).
    """

    path: Name | None = None
    sampling_session_seq_id: SamplingSessionSeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(WireModel):
    """The weights are kept: under `path`, or behind `sampling_session_id`."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = "save_weights_for_sampler"


# ---- Sample --------------------------------------------------------------------------------------


def _listed(stop: Any) -> Any:
    """Take tokens from an array or a tensor. Raises ValueError, once, for what is no stop at all."""
    stop = stop.tolist() if hasattr(stop, "tolist") else stop
    if stop is None or isinstance(stop, str):
        return stop
    if isinstance(stop, list | tuple | range):
        are_texts = {isinstance(each, str) for each in stop}
        if are_texts == {False}:
            return read_numbers(list(stop), "int64", "stop")
        if are_texts <= {True}:
            return stop
    raise ValueError("stop must be a text, a list of texts, or a list of token ids")


class SamplingParams(Argument):
    """How tokens are chosen. Log-probs are the model's own, whatever stands here."""

    _warns_only: ClassVar[bool] = True

    max_tokens: Count | None = None
    """None: until a stop, or until the context is full."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed gives the same tokens, alone and among any neighbours."""
    stop: Annotated[str | Listed[str] | Listed[Token] | None, BeforeValidator(_listed)] = None
    """None: at the end-of-sequence token. `[]`: nowhere. Else: there, and at end of sequence.

    What completes the stop stays in the output.
    """
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 takes the likeliest token every time."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Choose among the likeliest so many; -1 is no limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Choose among the likeliest whose probabilities add up to this."""


class SampleRequest(WireModel):
    """POST asample: continue a prompt `num_samples` times, and score it where asked to."""

    sampling_session_id: Name | None = None
    seq_id: SampleSeqId | None = None
    base_model: Name | None = None
    model_path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    num_samples: Annotated[int, Field(ge=1, lt=2**31)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TensorData | None = None
    """int64 `[len(prompt) - 1, K]`: token ids to score at prompt position `i + 1`; -1 asks for none."""
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class SampledSequence(WireModel):
    """One continuation of the prompt."""

    stop_reason: Literal["length", "stop"]
    tokens: list[int]
    """What stopped it is its last token, or its last tokens."""
    logprobs: list[LogProb] | None = None
    topk_logprobs: list[TopK | None] | None = None
    sequence_id: str | None = None
    """Given with the acceptance of the request, not with its result."""


class SampleResponse(WireModel):
    """Result of a sample request."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[LogProb | None] | None = None
    """One per prompt token; None where not asked for, and always for the first."""
    topk_prompt_logprobs: list[TopK | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    """float32 of the shape that was asked for; 0 where the request had -1."""
    prompt_cache_hit_tokens: int = 0
    type: Literal["sample"] = "sample"


# ---- Batch polling and cancelling ----------------------------------------------------------------


class SamplingSessionTarget(WireModel):
    """Whose completions are asked for: one sampler's, as one clone of its client made them."""

    sampling_session_id: Name
    cloned_sampler_id: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """`seq_id // CLONE_SEQ_IDS` of its requests."""
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(WireModel):
    """POST retrieve_futures: which of a sampler's requests have ended since `prev_cursor`."""

    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """What ended up to here has been read and may be forgotten."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait where nothing has ended; None is as long as the server likes."""
    retrieved_request_ids: Listed[Name] = Field(default=[], max_length=MAX_RETRIEVED)
    """Their results have arrived and need not be kept."""


class FutureCompletion(WireModel):
    """One request that has ended; its result, or its failure, is there to retrieve."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None
    """Bytes of the result."""


class RetrieveFuturesResponse(WireModel):
    """What has ended, in that order, and where to go on from."""

    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(WireModel):
    """POST cancel_future: this sample's result is no longer wanted."""

    request_id: Name
