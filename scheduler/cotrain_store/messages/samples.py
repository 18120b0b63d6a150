"""What a sampler is, and what its requests took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, SamplerId, SessionId, TenantId, WeightsRef


@dataclass(frozen=True)
class SamplerRecord:
    """One tenant's sampling session. Immutable: it never sees later weights."""

    id: SamplerId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    model_path: str | None
    """The path it was made from, as the client wrote it."""
    weights: WeightsRef | None
    """None: the base model alone."""
    ephemeral: bool
    """Made by a save without a name: nothing but this sampler refers to its weights."""
    created_at: float


@dataclass(frozen=True)
class SampleUsage:
    """What one sample request took. Of `prompt_tokens`, `cached_tokens` were not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0
