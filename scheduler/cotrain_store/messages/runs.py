"""Records of runs, tenants, sessions, samplers, pools, weights and checkpoints, and the entries of a run's history.

The last functions read the rows of Redis as records: the immutable part, and the fields that changed since.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from cotrain_store.messages.ids import PoolId, RunId, SamplerId, SessionId, TenantId, WeightsRef, WorkerId, decode


class RunState(StrEnum):
    """State of a run."""

    #: Accepts requests.
    LIVE = "live"
    #: Unloaded by its tenant, or its session finished: accepts no further requests.
    CLOSED = "closed"
    #: Stopped by the server because a replay did not reproduce the same numbers.
    FAILED = "failed"


#: Alpha of every adapter whose run did not set another, for any rank; the value of the hosted services.
DEFAULT_ALPHA = 32.0


@dataclass(frozen=True)
class LoraSpec:
    """Adapter that a run trains. Its addition to a weight is scaled by `alpha / rank`."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = DEFAULT_ALPHA
    per_expert: bool = False  # True if each expert of a layer has both matrices, as in some uploads
    optimizer: str = "adamw"  # or "muon"


@dataclass(frozen=True)
class RunRecord:
    """One LoRA training. Immutable except for `state` and the fields after it.

    A copy of a checkpoint belongs to a run of its own, which is closed from the start and has no log.
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
    """Number of times that the server lost the newest state and continued from a checkpoint."""
    rolled_back_to: str = ""  # path of the last such checkpoint
    note: str = ""
    tags: tuple[str, ...] = ()


FinishReason = Literal["success", "errored", "interrupted"]
Role = Literal["member", "viewer"]
"""Rights of a key for its tenant: "member" may do everything, "viewer" may only read."""


@dataclass(frozen=True)
class Tenant:
    """Tenant: the unit of isolation and billing, and the owner of every record."""

    id: TenantId
    name: str  # id of the API key that the request presented
    key_id: str = ""
    role: Role = "member"

    @property
    def may_change(self) -> bool:
        """True if the key may change records."""
        return self.role == "member"


@dataclass(frozen=True)
class SessionRecord:
    """Connection of one client process."""

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
    """One base model and the measurements of its workers: everything that the API needs to check requests."""

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
    """Name of its folder under `<data_dir>/tokenizers/`; empty if the base model has none."""
    max_sequence_tokens: int = 0
    """Maximum tokens of a prompt and its continuation together; 0 if the pool does not sample."""
    sampler: Literal["", "engine", "vllm"] = ""
    lora_widths: Mapping[str, int] = field(default_factory=dict)
    """Values that an adapter trains in `attn`, `mlp` and `unembed` for each unit of its rank: the
    sum of the inputs and outputs of their modules. `experts` are further ones of an adapter with
    both matrices of each expert. Empty if the worker does not report them.
    """
    tied_embeddings: bool | None = None
    """True if the unembedding is the embedding's matrix; None if the worker does not report it."""
    expert_choices: tuple[int, int, int] | None = None
    """Layers with experts, experts of each token, and experts of a layer; None without experts, or if layers differ."""
    memory_tokens: int = 0
    """Tokens of the longest datum that fits into device memory; 0 if it was not measured."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Fields of `ImageRules`; empty if the model reads text only."""

    @property
    def longest_datum(self) -> int:
        """Maximum tokens of a datum of training."""
        return min(self.memory_tokens or self.context_length, self.context_length)


@dataclass(frozen=True)
class SamplerRecord:
    """Sampling session of one tenant. Immutable: later training does not change it."""

    id: SamplerId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    model_path: str | None  # path that it was made from, as the client wrote it
    weights: WeightsRef | None  # None for the base model alone
    ephemeral: bool
    """True if a save without a name made it: only this sampler refers to its weights."""
    created_at: float
    step: int | None = None
    """Optimizer steps of the weights' run before they were saved; None for the base model, and if not known."""


#: A `weights` checkpoint also has the optimizer state if its save requests it; `external_weights` are for download.
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(frozen=True)
class WeightsRecord:
    """Immutable copy of a run's adapter, and of its optimizer state if the save requested it.

    It is kept while it has a user.
    """

    ref: WeightsRef
    run: RunId
    tenant: TenantId
    pool: PoolId
    worker: WorkerId  # worker that made the copy, and that alone has it until it is stored
    base_model: str
    lora: LoraSpec
    created_at: float
    digest: str = ""  # name of the folder with the copy; empty until that is durable
    size: int = 0  # bytes of all its files
    optimizer_digest: str = ""
    """Name of the file with the optimizer state; empty until that is durable, and if there is none."""
    has_optimizer: bool = False
    external: bool = False  # True if it has encrypted files of its own in `external_folder(ref)`


@dataclass(frozen=True)
class CheckpointRecord:
    """Name that a tenant gave to a durable copy of its run. Reusing the name moves it."""

    run: RunId
    tenant: TenantId
    kind: CheckpointKind
    name: str
    weights: WeightsRef
    base_model: str
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    public: bool = False  # True if every tenant may read it
    size: int = 0  # bytes of its files
    step: int = 0  # optimizer steps of its run before the save
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that its run received between that step and the save."""

    @property
    def path(self) -> str:
        """Path in the tenant's requests."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SaveRecords:
    """Records that a save writes: the weights, and the record that refers to them.

    A sampler appears with the commit, a checkpoint when its weights are durable.
    """

    weights: WeightsRecord
    user: CheckpointRecord | SamplerRecord
    overwrite: bool = False  # copied from the request
    last: bool = False  # copied from the request


def external_folder(ref: WeightsRef) -> str:
    """Return the name of the folder of the encrypted files of weights."""
    return hashlib.sha256(ref.encode()).hexdigest()


#: Default limit of the history points of all runs of a tenant.
HISTORY_POINTS = 500_000


@dataclass(frozen=True)
class PassEntry:
    """Contribution of a finished pass to its run's history."""

    loss: float  # `loss:sum` of its result
    weight: float
    is_forward: bool  # True for an evaluation: a pass without a gradient
    sampled: float = 0.0
    """Number of sampled tokens, of a policy loss; 0 for others. All sums below are over them."""
    gap: float = 0.0  # Sum of the distances from the log-probs at sampling, in nats
    gap_max: float = 0.0
    effective: float = 0.0  # Effective sample size, in tokens
    bounded: float = 0.0  # Number of tokens with an advantage and a bounded ratio
    clipped: float = 0.0  # Number of those out of bounds
    lagged: float = 0.0  # Number of targets with a `policy_step`, of any loss
    lag: float = 0.0  # Sum of the optimizer steps since they were sampled
    lag_max: float = 0.0


@dataclass(frozen=True)
class StepEntry:
    """Contribution of a finished optimizer step to its run's history."""

    norm: float
    rate: float


@dataclass(frozen=True)
class MetricsEntry:
    """Metrics of a tenant for its run's history, or a boundary of an evaluation. Body of a METRICS op."""

    values: Mapping[str, float]
    evaluation: str = ""
    """Metric that receives the loss per weight of an evaluation; empty for an op without one."""
    passes: int = 0  # Number of forwards that the evaluation had, at its end; 0 at its beginning


@dataclass(frozen=True)
class RewindEntry:
    """Return of a run to its state after an earlier op: its history continues from there."""

    to_seq: int
    to_step: int  # number of optimizer steps at that op


HistoryEntry = PassEntry | StepEntry | MetricsEntry | RewindEntry
#: Fields that `weights_record` reads.
WEIGHTS_FIELDS = ("record", "digest", "size", "optimizer")


def session_record(row: dict[bytes, bytes]) -> SessionRecord:
    """Return the session of a hash."""
    raw = json.loads(row[b"record"])
    raw["tags"] = tuple(raw["tags"])
    raw["project_id"] = row.get(b"project_id", b"").decode() or raw["project_id"]
    raw["finish_reason"] = row.get(b"reason", b"").decode()
    finished = row.get(b"finished_at")
    raw["finished_at"] = float(finished) if finished else None
    return decode(SessionRecord, raw)


def run_record(row: dict[bytes, bytes]) -> RunRecord:
    """Return the run of a hash."""
    last = row.get(b"last_request_at")
    later = {
        "state": RunState(row.get(b"state", b"live").decode()),
        "last_request_at": float(last) if last else None,
        "weights_epoch": int(row.get(b"weights_epoch", b"0")),
        "rolled_back_to": row.get(b"rolled_back_to", b"").decode(),
        "note": row.get(b"note", b"").decode(),
        "tags": tags_of(row.get(b"tags")),
    }
    return RunRecord(**vars(created_run(row[b"record"])) | later)


@lru_cache(maxsize=1024)  # by the stored bytes, so that none is outdated
def created_run(record: bytes) -> RunRecord:
    """Return a run with the part of its hash that does not change."""
    raw = json.loads(record)
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return decode(RunRecord, raw)


def tags_of(field: bytes | None) -> tuple[str, ...]:
    """Return the tags of a run."""
    return tuple(json.loads(field)) if field else ()


@lru_cache(maxsize=64)
def pool_record(row: bytes) -> PoolRecord:
    """Return the pool that its worker wrote."""
    raw = json.loads(row)
    raw["eos_token_ids"] = tuple(raw.get("eos_token_ids", ()))
    return decode(PoolRecord, raw)


def weights_record(row: Sequence[bytes]) -> WeightsRecord:
    """Return the record of weights with its later fields (WEIGHTS_FIELDS)."""
    raw = json.loads(row[0])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return replace(
        decode(WeightsRecord, raw), digest=row[1].decode(), size=int(row[2]), optimizer_digest=(row[3] or b"").decode()
    )
