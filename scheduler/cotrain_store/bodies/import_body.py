"""The body of an IMPORT op: an adapter that was made elsewhere, read but for the numbers in it.

The API that accepts it has read its configuration and its tensors' names and shapes; what is left for the
worker is to compare them with its base model and to scale.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import decode
from cotrain_store.messages.runs import LoraSpec

_MAGIC = b"CTI1"
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class PeftModule:
    """The LoRA matrices of one module: `W + scale * B @ A`."""

    name: str
    """Its path in the Hugging Face model: `model.layers.0.self_attn.q_proj`."""
    a: str
    """Name of the tensor `[rank, inputs]`; `rank` is at most that of the run."""
    b: str
    """Name of the tensor `[outputs, rank]`."""
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """A PEFT LoRA adapter, and the run it becomes."""

    lora: LoraSpec
    modules: tuple[PeftModule, ...]
    tensors: bytes
    """A safetensors file that holds the named tensors, perhaps the base model's embeddings, and nothing else."""


def encode_import(adapter: PeftAdapter) -> bytes:
    """Write an adapter as the body of an op."""
    about = {"lora": asdict(adapter.lora), "modules": [asdict(m) for m in adapter.modules]}
    head = json.dumps(about, separators=(",", ":")).encode()
    return b"".join([_MAGIC, len(head).to_bytes(_LENGTH_BYTES, "little"), head, adapter.tensors])


def decode_import(body: bytes) -> PeftAdapter:
    """Read `encode_import` back; raises MalformedBody."""
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
