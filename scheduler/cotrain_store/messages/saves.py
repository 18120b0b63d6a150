"""What a save and a load are asked for with, and what a save leaves.

What weights are, and the names that tenants give to them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from cotrain_store.messages.ids import (
    PoolId,
    RunId,
    SamplerId,
    TenantId,
    WeightsRef,
    WorkerId,
    decode,
)
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.samples import SamplerRecord

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


@dataclass(frozen=True)
class SaveRequest:
    """The body of a SAVE op: keep the weights under a name, or make a sampler of them at once.

    Exactly one of `name` and `sampler` is set.
    """

    name: str | None = None
    sampler: SamplerId | None = None
    kind: CheckpointKind = "sampler_weights"
    overwrite: bool = False
    """Of kind `weights`: take the name even if it is in use. The other kinds always take it."""
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    age_recipients: tuple[str, ...] = ()
    """Of kind `external_weights`: whom the files are encrypted to; without one they are as they are."""
    answer: dict[str, Any] = field(default_factory=dict)
    """Added to the result of the save, over what it says anyway."""
    last: bool = False
    """The run ends when this is stored."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read what `encode` wrote."""
        raw = json.loads(body)
        raw["age_recipients"] = tuple(raw.get("age_recipients", ()))
        return decode(cls, raw)


@dataclass(frozen=True)
class LoadSource:
    """Weights to load, and how much of them."""

    ref: WeightsRef
    coefficient: float = 1.0


@dataclass(frozen=True)
class LoadRequest:
    """The body of a LOAD op. Its weights are stored, and stay while the log needs them."""

    path: str
    """As the client wrote it: what the result names."""
    sources: tuple[LoadSource, ...]
    """One, or several to be added up."""
    optimizer: bool
    """Also the optimizer state; else it starts afresh."""
    lora: LoraSpec | None = None
    """Set at seq 0: it makes the run, with this adapter."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read what `encode` wrote."""
        raw = json.loads(body)
        raw["sources"] = tuple(decode(LoadSource, source) for source in raw["sources"])
        raw["lora"] = decode(LoraSpec, raw["lora"]) if raw.get("lora") else None
        return decode(cls, raw)


@dataclass(frozen=True)
class SaveRecords:
    """What a save leaves: the weights, and what refers to them.

    A sampler appears with the commit, a checkpoint when its weights are durable.
    """

    weights: WeightsRecord
    user: CheckpointRecord | SamplerRecord
    overwrite: bool = False
    """As its request says."""
    last: bool = False
    """As its request says."""
