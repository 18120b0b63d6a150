"""JSON messages of sampling, in the order in which a sampler uses them.

The limits here are those of the message format; the server checks limits of base model, prompt and tenant. All
are exported by `cotrain.types`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import override

from cotrain.wire.constants import NO_POLICY_STEP
from cotrain.wire.datums import ModelInput, Token
from cotrain.wire.model import Argument, Listed, Name, Path, Seconds, SequencedRequest, WireModel
from cotrain.wire.tensors import RoutedExperts, TensorData, read_numbers

__all__ = [
    "CancelFutureRequest", "CreateSamplingSessionRequest", "CreateSamplingSessionResponse", "FutureCompletion",
    "GetSamplerResponse", "PolicySpan", "RetrieveFuturesRequest", "RetrieveFuturesResponse", "SampleRequest", "SampleResponse",
    "SampledSequence", "SamplingParams", "SamplingSessionTarget", "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
]  # fmt: skip

MAX_RETRIEVED = 10_000
"""Maximum number of results that one poll acknowledges; SDK 0.38 has at most 2,000 requests in flight."""

CLONE_SEQ_IDS = 10**9
"""Clone k of a sampling client, created by unpickling it, numbers its requests from k times this."""

SamplingSessionSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
SampleSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Id of a sample request within its sampler; implies no order."""
Count = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(allow_inf_nan=True)]
TopK = list[tuple[int, LogProb]]
"""Most likely tokens of one position with their log-probs, most likely first."""


# ---- Sampler -------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(WireModel):
    """POST create_sampling_session: create a sampler of a base model or of saved weights."""

    session_id: Name
    sampling_session_seq_id: SamplingSessionSeqId
    """Counter of the session, shared with `SaveWeightsForSamplerRequest`."""
    base_model: Name | None = None
    model_path: Path | None = None
    """`tinker://<run>/sampler_weights/<name>`; takes precedence over `base_model`."""
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(WireModel):
    """Id of the new sampler."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class GetSamplerResponse(WireModel):
    """GET samplers/{id}: base model and weights of a sampler."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class SaveWeightsForSamplerRequest(SequencedRequest):
    """POST save_weights_for_sampler: save the run's weights after the requests before it.

    They get a name (`path`), or a sampler of their own (`sampling_session_seq_id`).
    """

    path: Name | None = None
    sampling_session_seq_id: SamplingSessionSeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None
    optimizer: bool | None = None
    """True: save the optimizer state as well, so that the run can be forked. Only without a name."""
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(WireModel):
    """Saved weights: their `path`, or the sampler `sampling_session_id`."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = "save_weights_for_sampler"


# ---- Sample --------------------------------------------------------------------------------------


def _listed(stop: Any) -> Any:
    """Convert arrays and tensors to lists. Raises a single ValueError if `stop` has an invalid type."""
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
    """Selection of tokens. Log-probs are always the model's own, independent of these parameters."""

    _warns_only: ClassVar[bool] = True

    max_tokens: Count | None = None
    """None: until a stop, or until the context is full."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """The same seed produces the same tokens, independent of other requests."""
    stop: Annotated[str | Listed[str] | Listed[Token] | None, BeforeValidator(_listed)] = None
    """None stops at the end-of-sequence token, `[]` nowhere, other values at both.

    The tokens that complete the stop stay in the output.
    """
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 always selects the most likely token."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Number of most likely tokens to choose from; -1 means no limit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Choose from the most likely tokens whose probabilities sum to this."""


class SampleRequest(WireModel):
    """POST asample: continue a prompt `num_samples` times, and score it on request."""

    sampling_session_id: Name | None = None
    seq_id: SampleSeqId | None = None
    base_model: Name | None = None
    model_path: Path | None = None
    num_samples: Annotated[int, Field(ge=1, lt=2**31)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TensorData | None = None
    """int64 `[len(prompt) - 1, K]`: token ids to score at prompt position `i + 1`; -1 means none."""
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    record_stability_info: bool | None = None
    return_routed_experts: bool = False
    """Return the experts of each token; needs a base model with experts."""
    type: Literal["sample"] = "sample"


class PolicySpan(WireModel):
    """Part of a sequence, `tokens[start:end]`, that one set of weights sampled."""

    start: int
    end: int
    training_run_id: str | None = None
    """Run of the weights; None for the base model."""
    step: int | None = None
    """Number of optimizer steps of the run before its weights were saved; None if it is not known."""


class SampledSequence(WireModel):
    """Continuation of the prompt."""

    stop_reason: Literal["length", "stop"]
    tokens: list[int]
    """Includes the token or tokens that stopped it."""
    logprobs: list[LogProb] | None = None
    topk_logprobs: list[TopK | None] | None = None
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens before the last, which follow those of the prompt; None if not requested."""
    policy_spans: list[PolicySpan] | None = None
    """Policy versions of all tokens, in order; one span, because the weights of a sampler never change."""
    sequence_id: str | None = None
    """Sent when the request is accepted, not with its result."""

    @property
    def policy_steps(self) -> list[int]:
        """Optimizer step of the weights for each token, -1 if not known: the end of a datum's `policy_step`."""
        steps = [NO_POLICY_STEP] * len(self.tokens)
        for span in self.policy_spans or ():
            if span.step is not None:
                steps[span.start : span.end] = [span.step] * (span.end - span.start)
        return steps


class SampleResponse(WireModel):
    """Result of a sample request."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[LogProb | None] | None = None
    """One per prompt token; None where not requested, and always for the first."""
    topk_prompt_logprobs: list[TopK | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    """float32 in the requested shape; 0 where the request had -1."""
    prompt_cache_hit_tokens: int = 0
    prompt_routed_experts: RoutedExperts | None = None
    """Experts of the prompt tokens; None if not requested."""
    type: Literal["sample"] = "sample"

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "sequences", len(self.sequences)
        yield "tokens", sum(len(each.tokens) for each in self.sequences)
        if self.prompt_logprobs is not None:
            yield "prompt_tokens", len(self.prompt_logprobs)


# ---- Batch polling and cancelling ----------------------------------------------------------------


class SamplingSessionTarget(WireModel):
    """Source of the polled completions: one sampler, with the requests of one clone of its client."""

    sampling_session_id: Name
    cloned_sampler_id: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """`seq_id // CLONE_SEQ_IDS` of its requests."""
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(WireModel):
    """POST retrieve_futures: poll the requests of a sampler that ended since `prev_cursor`."""

    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """Completions up to here have been read, and the server may drop them."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait while nothing has ended; None lets the server choose."""
    retrieved_request_ids: Listed[Name] = Field(default=[], max_length=MAX_RETRIEVED)
    """Requests whose results have arrived, and which the server may drop."""


class FutureCompletion(WireModel):
    """Completed request; its result or failure can be retrieved."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None
    """Size of the result in bytes."""


class RetrieveFuturesResponse(WireModel):
    """Completions in order of completion, and the cursor for the next poll."""

    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(WireModel):
    """POST cancel_future: the client no longer needs this sample's result."""

    request_id: Name
