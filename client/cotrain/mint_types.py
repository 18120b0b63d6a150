"""What the two extensions of the `mint` SDK send, in its own spelling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cotrain.data import ModelInput
from cotrain.tensors import TensorData
from cotrain.wire_model import Name, SeqId, WireModel

Path = Annotated[str, Field(min_length=1, max_length=1_024)]
"""A `tinker://` path, or the name of a base model where one will do."""

Coefficient = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Of one checkpoint in a combination; beyond these the product may be too large for float32."""


class ReverseKlDatum(WireModel):
    """A continuation, and the two contexts it follows: the run's and the reference's."""

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    weights: TensorData


class ReverseKlRequest(WireModel):
    """POST mint/forward_backward_reverse_kl: pull a run towards a reference that stays as it is."""

    model_id: Name
    reference_model_path: Path
    data: list[ReverseKlDatum]
    temperature: float = 1.0
    seq_id: SeqId | None = None
    """None: behind all that the run was sent so far."""
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


class InterpolateRequest(WireModel):
    """POST mint/checkpoints/interpolate: make a checkpoint that is a linear combination of others."""

    source_paths: list[Path]
    coefficients: list[Coefficient]
    output_path: str | None = None
    """The name of the new checkpoint, without a `/`; None: the server names it."""
    output_checkpoint_type: Literal["sampler"] = "sampler"
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"
