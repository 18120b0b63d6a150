"""Bodies of the ops that save, load or import an adapter.

For an import, the API parses the configuration of the adapter, and the names and shapes of its tensors. The worker
compares them with its base model and scales the values.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import SamplerId, WeightsRef, decode
from cotrain_store.messages.runs import CheckpointKind, LoraSpec


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


_MAGIC = b"CTI1"
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class PeftModule:
    """LoRA matrices of one module: `W + scale * B @ A`."""

    name: str
    """Path of the module in the Hugging Face model: `model.layers.0.self_attn.q_proj`.

    For experts, it is the path of a parameter (`model.layers.0.mlp.experts.gate_up_proj`), the path of one expert's
    module (`model.layers.0.mlp.experts.5.gate_proj`), or Tinker's name (`model.layers.0.mlp.experts.w1`).
    """
    a: str  # name of the tensor `[rank, inputs]`; `rank` is at most that of the run
    b: str  # name of the tensor `[outputs, rank]`
    scale: float
    in_halves: bool = False
    """True if the first half of the ranks is of the experts' gate, and the second of their up."""


@dataclass(frozen=True)
class PeftAdapter:
    """PEFT LoRA adapter, and the LoRA settings of its run."""

    lora: LoraSpec
    modules: tuple[PeftModule, ...]
    tensors: bytes
    """Safetensors file with the named tensors, and possibly the base model's embeddings."""


def encode_import(adapter: PeftAdapter) -> bytes:
    """Return the body of an op for an adapter."""
    about = {"lora": asdict(adapter.lora), "modules": [asdict(m) for m in adapter.modules]}
    head = json.dumps(about, separators=(",", ":")).encode()
    return b"".join([_MAGIC, len(head).to_bytes(_LENGTH_BYTES, "little"), head, adapter.tensors])


def decode_import(body: bytes) -> PeftAdapter:
    """Return the adapter of a body from `encode_import`. Raises MalformedBody."""
    start = len(_MAGIC) + _LENGTH_BYTES
    end = start + int.from_bytes(body[len(_MAGIC) : start], "little")
    if not body.startswith(_MAGIC):
        raise MalformedBody("This is not an adapter to import.")
    try:
        about = json.loads(body[start:end])
        lora = decode(LoraSpec, about["lora"])
        modules = tuple(decode(PeftModule, module) for module in about["modules"])
    except (ValueError, KeyError, TypeError) as broken:
        raise MalformedBody("The adapter to import cannot be read.") from broken
    return PeftAdapter(lora, modules, body[end:])
