"""What a run is: its adapter, its owner, and where it is in its life.

Who asks: a tenant, and the sessions of its clients.

What a pool can do, as its workers measured it.

The history of a run: what its optimizer steps and its evaluations found, a point for each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

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


FinishReason = Literal["success", "errored", "interrupted"]
Role = Literal["member", "viewer"]
"""What a key may do for its tenant: everything, or read."""


@dataclass(frozen=True)
class Tenant:
    """Who pays and is isolated: the owner of every record."""

    id: TenantId
    name: str
    """Of the key that was shown."""
    key_id: str = ""
    role: Role = "member"

    @property
    def may_change(self) -> bool:
        """Return whether the key may do more than read."""
        return self.role == "member"


@dataclass(frozen=True)
class SessionRecord:
    """One client process's connection."""

    id: SessionId
    tenant: TenantId
    created_at: float
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    finished_at: float | None = None
    finish_reason: str = ""


@dataclass(frozen=True)
class PoolRecord:
    """One base model and what its workers measured about it: all the API needs to check requests."""

    id: PoolId
    base_model: str
    architecture: str
    vocab_size: int
    context_length: int
    max_rank: int
    num_parameters: int
    device: str
    dtype: str
    numerics_id: str
    tokens_per_s: float
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: str = ""
    """Its folder's name under `<data_dir>/tokenizers/`; empty where the base model has none."""
    max_sequence_tokens: int = 0
    """What a prompt and its continuation may have together; 0 where the pool does not sample."""
    sampler: Literal["", "engine", "vllm"] = ""
    lora_widths: Mapping[str, int] = field(default_factory=dict)
    """Values that an adapter trains in `attn`, `mlp` and `unembed` for each unit of its rank: inputs and
    outputs of their modules. Empty where an older version's worker wrote this."""


#: Without a quota of its own a tenant's runs may have this many points in all.
HISTORY_POINTS = 500_000

PointKind = Literal["optim_step", "forward"]

#: How `scripts/lib/history.lua` packs a point: ordinal, step, seq, time, loss, weight, gradient norm,
#: learning rate, tokens, tokens of the run, passes. Doubles are kept as they are, to the last bit.
POINT = struct.Struct("<IIQdddddQQI")


@dataclass(frozen=True)
class PassEntry:
    """What a pass that is done adds to its run's history."""

    loss: float
    """`loss:sum` of its result."""
    weight: float
    is_forward: bool
    """Without a gradient: an evaluation."""


@dataclass(frozen=True)
class StepEntry:
    """What an optimizer step that is done adds to its run's history."""

    norm: float
    rate: float


HistoryEntry = PassEntry | StepEntry


@dataclass(frozen=True)
class HistoryPoint:
    """One optimizer step with the passes that went into it, or the forwards between two of those."""

    kind: PointKind
    step: int
    """Optimizer steps of the run up to this one, counted from 1; before a forward, from 0."""
    steps: int
    """How many points in a row this one stands for, itself the last of them: 1 until a history is thinned."""
    seq: int
    """Of the run's log: the optimizer step, or the newest of the forwards."""
    time_s: float
    """When it was committed, in seconds since the epoch."""
    loss_sum: float
    """`loss:sum` of the passes, added up in their order."""
    weight_sum: float
    """Of all weights of the passes; of a loss without weights, the number of advantages other than 0."""
    grad_norm: float | None
    """Before clipping; None for forwards."""
    learning_rate: float | None
    """None for forwards."""
    tokens: int
    """That the base model read in those passes."""
    run_tokens: int
    """The like, of all passes with a gradient since the run began."""
    passes: int


def read_points(kind: PointKind, stored: Iterable[bytes]) -> list[HistoryPoint]:
    """Read the points of one kind, in their order, as the script packed them."""
    points, before = [], 0
    for row in stored:
        number, step, seq, time_s, loss, weight, norm, rate, tokens, run_tokens, passes = (
            POINT.unpack(row)
        )
        is_step = kind == "optim_step"
        points.append(
            HistoryPoint(
                kind=kind,
                step=step,
                steps=number - before,
                seq=seq,
                time_s=time_s,
                loss_sum=loss,
                weight_sum=weight,
                grad_norm=norm if is_step else None,
                learning_rate=rate if is_step else None,
                tokens=tokens,
                run_tokens=run_tokens,
                passes=passes,
            )
        )
        before = number
    return points
