"""JSON messages of runs and training, in the order in which a run uses them.

Requests ignore unknown fields, because SDKs of several versions send them. The file also contains the messages
of single futures, and the two extensions of the `mint` SDK with its field names.
"""

from collections.abc import Iterator
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import override

from cotrain.errors import Category
from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.custom_loss import MAX_ID
from cotrain.wire.datums import Datum, ModelInput, as_tensor
from cotrain.wire.model import Argument, Listed, ModelSeqId, Name, Path, SeqId, SequencedRequest, WireModel
from cotrain.wire.rest import Note, Tags
from cotrain.wire.tensors import RoutedExperts, TensorData

__all__ = [
    "AdamParams", "CreateModelRequest", "CreateModelResponse", "ForwardBackwardInput",
    "ForwardBackwardRequest", "ForwardRequest", "FutureRetrieveRequest", "GetInfoRequest", "GetInfoResponse",
    "InterpolateResponse", "LoraConfig", "ModelData", "MuonOptimizerConfig", "MuonParams", "OptimStepRequest",
    "OptimStepResponse", "OptimizerConfig", "RequestFailedResponse", "ReverseKlDatum", "ReverseKlResponse",
    "SweepFuture", "SweepFutures", "TryAgainResponse", "UnloadModelRequest", "UnloadModelResponse",
    "UntypedAPIFuture",
]  # fmt: skip

# ---- Run -----------------------------------------------------------------------------------------


MAX_ALPHA = 655_360.0
"""Ten times the largest rank of any LoRA: a larger alpha is a mistake."""


class LoraConfig(Argument):
    """Adapter to train: it adds `alpha / rank * B @ A` to every weight that it is attached to.

    A is `[rank, inputs]` and starts random, B is `[outputs, rank]` and starts as zeros. Raises ValidationError (a
    ValueError) for an alpha outside (0, 655360], and for any dropout but 0. A forward must return the same
    numbers as the backward that follows it.
    """

    rank: int = 32
    """Rows of A and columns of B; the server limits it to the base model's hidden size."""
    alpha: Annotated[float, Field(gt=0, le=MAX_ALPHA)] = 32.0
    """The default is the same for every rank, as in the hosted services."""
    dropout: float = 0.0
    """Only 0 is implemented."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of the random A; None derives it from the run's id."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @field_validator("dropout")
    @classmethod
    def _refuse_dropout(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError("dropout is not implemented; use 0")
        return dropout


def _refuse_dimuon(name: Any) -> Any:
    if name == "dimuon":
        raise ValueError("dimuon is not served, because its rule is not published in full. muon is a related optimizer")
    return name


class OptimizerConfig(WireModel):
    """Optimizer of a run, fixed when the run is created."""

    type: Annotated[Literal["adamw", "muon"], BeforeValidator(_refuse_dimuon)] = "adamw"


class MuonOptimizerConfig(OptimizerConfig):
    """Muon as the optimizer of a run."""

    type: Annotated[Literal["adamw", "muon"], BeforeValidator(_refuse_dimuon)] = "muon"


class CreateModelRequest(WireModel):
    """POST create_model: create a run."""

    session_id: Name
    model_seq_id: ModelSeqId
    base_model: Name
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    note: Note | None = None
    tags: Tags | None = None
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(WireModel):
    """Id of the new run, which the wire calls `model_id`."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class NewRun(WireModel):
    """Id of a new run, in the result of any request that creates one."""

    model_id: str


class GetInfoRequest(WireModel):
    """POST get_info."""

    model_id: Name
    type: Literal["get_info"] = "get_info"


class ModelData(WireModel):
    """Base model of a run."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""Tokenizer files that a server sends, and the only ones that a client accepts: data, no code."""


class TokenizerResponse(WireModel):
    """Tokenizer of a base model, in the files that transformers saves."""

    files: dict[str, str]
    """Text of TOKENIZER_FILES, by name; not every tokenizer has all of them."""


class GetInfoResponse(WireModel):
    """Properties of a run."""

    model_data: ModelData
    model_id: str
    is_lora: bool | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    model_name: str | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    weights_epoch: int = 0
    """Number of rollbacks: its newest state was lost with a disk, and it continued from a checkpoint."""
    rolled_back_to: str | None = None
    """Path of the checkpoint of the last rollback."""
    type: Literal["get_info"] | None = "get_info"


class UnloadModelRequest(WireModel):
    """POST unload_model: close a run."""

    model_id: Name
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(WireModel):
    """Result of closing a run."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


# ---- Training ------------------------------------------------------------------------------------


class ForwardBackwardInput(WireModel):
    """Datums of one pass, and their loss."""

    data: Listed[Datum]
    loss_fn: Name
    """cross_entropy, importance_sampling, ppo, cispo, dro, gspo, reinforce, grpo, dapo, sapo or custom."""
    loss_fn_config: dict[str, float | str] | None = None
    """`clip_low_threshold` and `clip_high_threshold` are ratios; `beta` is for dro, `loss_id` for custom."""


class ForwardBackwardRequest(SequencedRequest):
    """POST forward_backward as JSON; newer clients send the binary message of this name."""

    forward_backward_input: ForwardBackwardInput


class ForwardRequest(SequencedRequest):
    """POST forward as JSON."""

    forward_input: ForwardBackwardInput


def _finite_or_none(norm: Any) -> Any:
    return 0.0 if norm == inf else norm  # JSON has no infinity, and 0 has the same meaning


class AdamParams(Argument):
    """Parameters of one AdamW step as in `torch.optim.AdamW`; the defaults are those of the hosted SDK."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, BeforeValidator(_finite_or_none)] = 0.0
    """Maximum L2 norm of the gradient of the whole adapter; 0 and inf disable clipping. A negative one is rejected."""


class MuonParams(Argument):
    """Parameters of one Muon step, for a run with that optimizer; see docs/guide/optimizers.md.

    A step has the size of an AdamW step with the same learning rate.
    """

    type: Annotated[Literal["muon"], BeforeValidator(_refuse_dimuon)] = "muon"
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, BeforeValidator(_finite_or_none)] = 0.0
    """Maximum L2 norm of the gradient of the whole adapter; 0 and inf disable clipping."""


class OptimStepRequest(SequencedRequest):
    """POST optim_step, with the parameters of the run's optimizer."""

    adam_params: AdamParams | None = None
    optimizer_params: MuonParams | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise ValueError("send adam_params for AdamW, or optimizer_params for muon")
        return self


class OptimStepResponse(WireModel):
    """Result of an optimizer step."""

    metrics: dict[str, Annotated[float, Field(allow_inf_nan=True)]] | None = None
    """`grad_norm`: L2, over the whole adapter, before it was scaled down; `clock_cycle:unique`."""


class UntypedAPIFuture(WireModel):
    """Response to every queued request: the id for polling its result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class ForkRunRequest(WireModel):
    """POST fork_run: create runs with the weights and the optimizer state of an unnamed save."""

    session_id: Name
    sampling_session_id: Name
    """Sampler of the save, which had `optimizer` set."""
    model_seq_ids: Annotated[list[ModelSeqId], Field(min_length=1, max_length=MAX_SWEEP_RUNS)]
    user_metadata: Annotated[list[dict[str, Any]], Field(max_length=MAX_SWEEP_RUNS)] | None = None
    """One for each run."""
    tags: Tags | None = None
    type: Literal["fork_run"] = "fork_run"


class SweepFuture(WireModel):
    """Requests of one run of a sweep: the pass, and its optimizer step, if any."""

    model_id: str
    request_ids: list[str] = Field(default=[])
    error: str | None = None
    """Reason why this run accepts no further requests; the other runs are not affected."""
    status_code: int = 200
    """HTTP status of `error`, as for a request of this run alone."""


class SweepFutures(WireModel):
    """Response to POST sweep_pass: one entry for each run, in the order sent."""

    runs: list[SweepFuture]


class FutureRetrieveRequest(WireModel):
    """POST retrieve_future."""

    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID)]  # may contain a custom loss
    allow_metadata_only: bool = False


class TryAgainResponse(WireModel):
    """Response while the result is pending; sent with status 408."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class RequestFailedResponse(WireModel):
    """Response for a failed request; sent with status 200."""

    error: str
    category: Category


Coefficient = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Coefficient of one checkpoint; a larger product could overflow float32."""


class ReverseKlDatum(WireModel):
    """Continuation of n tokens and its two contexts: the run's and the reference's.

    Targets and weights may be lists, NumPy arrays, torch tensors or TensorData.
    """

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    """int64 `[n]`."""
    weights: TensorData
    """float32 `[n]`; a target of weight 0 is not computed."""
    routed_experts: RoutedExperts | None = None
    """Experts of the run's tokens, in a mixture of experts: of `student_input`, and of all targets but the last."""

    @field_validator("target_tokens", "weights", mode="before")
    @classmethod
    def _convert_arrays(cls, value: Any, info: ValidationInfo) -> Any:
        return as_tensor(info.field_name or "", value)

    @field_validator("routed_experts", mode="before")
    @classmethod
    def _convert_experts(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, dict) else RoutedExperts.of(value)


class ReverseKlRequest(WireModel):
    """POST mint/forward_backward_reverse_kl: move a run towards a reference, which is not changed."""

    model_id: Name
    reference_model_path: Path
    data: Listed[ReverseKlDatum]
    temperature: float = 1.0
    seq_id: SeqId | None = None
    """None: after all requests that the run has received so far."""
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


class PlacedReverseKlRequest(SequencedRequest, ReverseKlRequest):
    """Reverse KL request with a position in the run's order, assigned by its client."""


class ReverseKlItem(WireModel):
    """Losses of one datum."""

    loss: TensorData
    """float32 `[1]`: sum over the tokens."""
    token_losses: TensorData | None = None
    """float32 `[n]`: terms of the sum, 0 where the weight is 0."""


class ReverseKlResponse(WireModel):
    """Result of a reverse KL, per datum in the order sent."""

    outputs: list[ReverseKlItem]
    metrics: dict[str, float]
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "datums", len(self.outputs)
        yield "metrics", self.metrics

    @property
    def loss(self) -> float:
        """The loss of the batch, summed over targets."""
        return self.metrics["loss:sum"]


class InterpolateRequest(WireModel):
    """POST mint/checkpoints/interpolate: create a checkpoint as a linear combination of others."""

    source_paths: Listed[Path]
    coefficients: Listed[Coefficient]
    output_path: str | None = None
    """Name of the new checkpoint, without a `/`; None: the server chooses it."""
    output_checkpoint_type: Literal["sampler"] = "sampler"
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"


class InterpolateResponse(WireModel):
    """Result of an interpolation: the path of the new sampler weights, and their sources."""

    path: str
    checkpoint_type: Literal["sampler"] = "sampler"
    source_paths: list[str]
    coefficients: list[float]
    has_rank_shards: bool = False
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"
