"""What the two extensions of the `mint` SDK send, in its own spelling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cotrain.wire.datums import ModelInput, as_tensor
from cotrain.wire.model import Listed, Name, SeqId, SequencedRequest, WireModel
from cotrain.wire.tensors import TensorData

Path = Annotated[str, Field(min_length=1, max_length=1_024)]
"""A `tinker://` path, or the name of a base model where one will do."""

Coefficient = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Of one checkpoint in a combination; beyond these the product may be too large for float32."""


class ReverseKlDatum(WireModel):
    """A continuation of n tokens, and the two contexts it follows: the run's and the reference's.

    Targets and weights may be given as a list, a NumPy array, a torch tensor or TensorData.
    """

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    """int64 `[n]`."""
    weights: TensorData
    """float32 `[n]`; a target of weight 0 is not computed."""

    @field_validator("target_tokens", "weights", mode="before")
    @classmethod
    def _convert_arrays(cls, value: Any, info: ValidationInfo) -> Any:
        return as_tensor(info.field_name or "", value)


class ReverseKlRequest(WireModel):
    """POST mint/forward_backward_reverse_kl: pull a run towards a reference that stays as it is."""

    model_id: Name
    reference_model_path: Path
    data: Listed[ReverseKlDatum]
    temperature: float = 1.0
    seq_id: SeqId | None = None
    """None: behind all that the run was sent so far."""
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


class PlacedReverseKlRequest(SequencedRequest, ReverseKlRequest):
    """The same, in the place in the run's order that its client gives it."""


class ReverseKlItem(WireModel):
    """What one datum gave."""

    loss: TensorData
    """float32 `[1]`: its sum."""
    token_losses: TensorData | None = None
    """float32 `[n]`: its terms, 0 where the weight is 0."""


class ReverseKlResponse(WireModel):
    """Result of a reverse KL, per datum in the order they were sent."""

    outputs: list[ReverseKlItem]
    metrics: dict[str, float]
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"

    @property
    def loss(self) -> float:
        """The loss of the batch, summed over targets."""
        return self.metrics["loss:sum"]


class InterpolateRequest(WireModel):
    """POST mint/checkpoints/interpolate: make a checkpoint that is a linear combination of others."""

    source_paths: Listed[Path]
    coefficients: Listed[Coefficient]
    output_path: str | None = None
    """The name of the new checkpoint, without a `/`; None: the server names it."""
    output_checkpoint_type: Literal["sampler"] = "sampler"
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"


class InterpolateResponse(WireModel):
    """Result of an interpolation: where the new sampler weights lie, and what they were made of."""

    path: str
    checkpoint_type: Literal["sampler"] = "sampler"
    source_paths: list[str]
    coefficients: list[float]
    has_rank_shards: bool = False
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"
