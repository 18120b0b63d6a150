"""What weights are, and the names that tenants give to them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, RunId, TenantId, WeightsRef, WorkerId
    from cotrain_store.messages.runs import LoraSpec

#: `weights` has the optimizer state too, when its save says so; `external_weights` are to be fetched.
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True)
class WeightsRecord:
    """An immutable copy of a run's adapter, and of its optimizer state where a save asked for it.

    It lives as long as something uses it.
    """

    ref: WeightsRef
    run: RunId
    tenant: TenantId
    pool: PoolId
    worker: WorkerId
    """Who made the copy, and alone has it until it is stored."""
    base_model: str
    lora: LoraSpec
    created_at: float
    digest: str = ""
    """Names the folder that holds it; empty until that is durable."""
    size: int = 0
    """Bytes of all its files."""
    optimizer_digest: str = ""
    """Names the file of the optimizer state; empty until that is durable, and where there is none."""
    has_optimizer: bool = False
    external: bool = False
    """Encrypted files of its own lie in `external_folder(ref)`."""


@dataclass(frozen=True)
class CheckpointRecord:
    """A name that a tenant gave to a copy of its run, once that is durable; naming again moves it."""

    run: RunId
    tenant: TenantId
    kind: CheckpointKind
    name: str
    weights: WeightsRef
    base_model: str
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    """Every tenant may read it."""
    size: int = 0
    """Bytes of its files."""

    @property
    def path(self) -> str:
        """How its tenant asks for it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def external_folder(ref: WeightsRef) -> str:
    """Name the folder of the encrypted files of weights."""
    return hashlib.sha256(ref.encode()).hexdigest()
