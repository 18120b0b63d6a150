"""Body of an IMPORT op: an adapter that was trained elsewhere.

The API parses the adapter's configuration and the names and shapes of its tensors. The worker compares them with
its base model and scales the values.
"""

import json
from dataclasses import asdict, dataclass

from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import decode
from cotrain_store.messages.runs import LoraSpec

_MAGIC = b"CTI1"
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class PeftModule:
    """LoRA matrices of one module: `W + scale * B @ A`."""

    name: str
    """Path of the module in the Hugging Face model: `model.layers.0.self_attn.q_proj`.

    Of experts the path of a parameter, `model.layers.0.mlp.experts.gate_up_proj`, of one expert's module,
    `model.layers.0.mlp.experts.5.gate_proj`, or Tinker's name, `model.layers.0.mlp.experts.w1`.
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
