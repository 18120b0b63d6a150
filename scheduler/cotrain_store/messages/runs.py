"""What a run is: its adapter, its owner, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId


class RunState(StrEnum):
    """Where one run is in its life."""

    #: Takes requests.
    LIVE = "live"
    #: Unloaded by its tenant, or its session finished: takes no more requests.
    CLOSED = "closed"
    #: Stopped by the server because a replay did not give the same numbers.
    FAILED = "failed"


#: Of every adapter whose run did not choose another, whatever its rank: that of the hosted services.
DEFAULT_ALPHA = 32.0


@dataclass(frozen=True)
class LoraSpec:
    """The adapter a run trains. What it adds to a weight is scaled by `alpha / rank`."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = DEFAULT_ALPHA


@dataclass(frozen=True)
class RunRecord:
    """One LoRA training. Immutable but for `state` and what follows it.

    A copy of a checkpoint lies in a run of its own, which is closed from the start and has no log.
    """

    id: RunId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    lora: LoraSpec
    created_at: float
    user_metadata: dict[str, Any] = field(default_factory=dict)
    state: RunState = RunState.LIVE
    last_request_at: float | None = None
    weights_epoch: int = 0
    """How often the server lost its newest state and went on from a checkpoint."""
    rolled_back_to: str = ""
    """The path of the last such checkpoint."""
    note: str = ""
    tags: tuple[str, ...] = ()
