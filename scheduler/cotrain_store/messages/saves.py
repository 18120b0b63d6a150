"""Requests of saves and loads, and the records of weights and checkpoints."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from cotrain_store.messages.ids import PoolId, RunId, SamplerId, TenantId, WeightsRef, WorkerId, decode
from cotrain_store.messages.runs import LoraSpec, SamplerRecord

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


def external_folder(ref: WeightsRef) -> str:
    """Return the name of the folder of the encrypted files of weights."""
    return hashlib.sha256(ref.encode()).hexdigest()


@dataclass(frozen=True)
class SaveRequest:
    """Body of a SAVE op: store the weights under a name, or make a sampler of them at once.

    Exactly one of `name` and `sampler` is set.
    """

    name: str | None = None
    sampler: SamplerId | None = None
    kind: CheckpointKind = "sampler_weights"
    overwrite: bool = False
    """For kind `weights`: replace an existing checkpoint of this name. The other kinds always replace it."""
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    age_recipients: tuple[str, ...] = ()
    """For kind `external_weights`: recipients of the encrypted files; the files are not encrypted if empty."""
    answer: dict[str, Any] = field(default_factory=dict)
    """Fields added to the result of the save; they override its own fields."""
    last: bool = False  # the run ends when this is stored

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Return the request that `encode` wrote."""
        raw = json.loads(body)
        raw["age_recipients"] = tuple(raw.get("age_recipients", ()))
        return decode(cls, raw)


@dataclass(frozen=True)
class LoadSource:
    """Weights to load, and their coefficient."""

    ref: WeightsRef
    coefficient: float = 1.0


@dataclass(frozen=True)
class LoadRequest:
    """Body of a LOAD op. Its weights are stored and kept while the log needs them."""

    path: str  # path as the client wrote it, named in the result
    sources: tuple[LoadSource, ...]  # one source, or several to be added
    optimizer: bool  # load the optimizer state, too; otherwise it starts at zero
    lora: LoraSpec | None = None  # set at seq 0: the op creates the run with this adapter

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Return the request that `encode` wrote."""
        raw = json.loads(body)
        raw["sources"] = tuple(decode(LoadSource, source) for source in raw["sources"])
        raw["lora"] = decode(LoraSpec, raw["lora"]) if raw.get("lora") else None
        return decode(cls, raw)


@dataclass(frozen=True)
class SaveRecords:
    """Records that a save writes: the weights, and the record that refers to them.

    A sampler appears with the commit, a checkpoint when its weights are durable.
    """

    weights: WeightsRecord
    user: CheckpointRecord | SamplerRecord
    overwrite: bool = False  # copied from the request
    last: bool = False  # copied from the request
