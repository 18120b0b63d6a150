"""What a save and a load are asked for with, and what a save leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from cotrain_store.messages.encoding import decode
from cotrain_store.messages.runs import LoraSpec

if TYPE_CHECKING:
    from cotrain_store.messages.ids import SamplerId, WeightsRef
    from cotrain_store.messages.samples import SamplerRecord
    from cotrain_store.messages.weights import CheckpointKind, CheckpointRecord, WeightsRecord


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
