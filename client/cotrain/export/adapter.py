"""A downloaded adapter: PEFT's configuration, and its two matrices of each module."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed
from cotrain.export.experts import at_tinker as names_of_tinker
from cotrain.export.libraries import library

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
UNEMBED = "lm_head"
_PREFIX = "base_model.model."
_INNER = ".base_layer"
_EXPERTS = re.compile(r"(?P<module>.+\.experts(\.base_layer)?)")
_ENDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class Adapter:
    """LoRA matrices by module: the effective weight is `W + scale * B @ A`."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """Content of its file."""
    matrices: Mapping[str, tuple[Any, Any]]
    """Module, such as `model.layers.0.self_attn.q_proj` → A `[rank, inputs]` and B `[outputs, rank]`, fp32. Each
    expert has modules of its own, such as `model.layers.0.mlp.experts.3.gate_proj`."""

    @property
    def rank(self) -> int:
        """Rank of all matrices."""
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        """Numerator of the scale."""
        return float(self.config["lora_alpha"])

    @property
    def scale(self) -> float:
        """Factor on `B @ A`."""
        return self.alpha / self.rank

    @property
    def trains_experts(self) -> bool:
        """True if experts have LoRA matrices."""
        return bool(self.config.get("target_parameters"))

    @property
    def trains_unembedding(self) -> bool:
        """True if the unembedding has LoRA matrices."""
        return UNEMBED in self.matrices

    def change_of(self, module: str) -> Any:
        """Return `scale * B @ A` of a module, fp32 `[outputs, inputs]`."""
        a, b = self.matrices[module]
        return self.scale * (b @ a)

    def without_unembedding(self) -> Adapter:
        """Return the adapter without the matrices of the unembedding."""
        targets = [name for name in self.config["target_modules"] if name != UNEMBED]
        left = {name: pair for name, pair in self.matrices.items() if name != UNEMBED}
        tensors = {name: each for name, each in self.tensors.items() if f".{UNEMBED}." not in name}
        return Adapter({**self.config, "target_modules": targets}, tensors, left)


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder as the server writes it. Raises ExportFailed for another or an encrypted one."""
    load = library("safetensors.torch").load_file
    if not (folder / TENSORS).is_file():
        raise ExportFailed(
            f"the checkpoint has no {TENSORS}: an encrypted one cannot be exported; export the run's "
            "weights or sampler_weights"
        )
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensors = load(folder / TENSORS)
    halves = [
        {
            name.removeprefix(_PREFIX).removesuffix(end): tensor.float()
            for name, tensor in tensors.items()
            if name.endswith(end)
        }
        for end in _ENDS
    ]
    if halves[0].keys() != halves[1].keys() or len(tensors) != 2 * len(halves[0]):
        raise ExportFailed(f"{TENSORS} holds more than pairs of LoRA matrices")
    matrices: dict[str, tuple[Any, Any]] = {}
    for name, a in halves[0].items():
        b, stack = halves[1][name], _EXPERTS.fullmatch(name)
        matrices |= _of_experts(stack["module"], a, b, int(config["r"])) if stack else {name: (a, b)}
    return Adapter(config, tensors, matrices)


def _of_experts(module: str, a: Any, b: Any, rank: int) -> dict[str, tuple[Any, Any]]:
    """Return the matrices of each expert, from PEFT's form of a parameter of all experts.

    There A is `[experts * rank, inputs]`, expert slowest, and B `[outputs, rank * experts]`, expert fastest.
    The parameter of gate and up is wrapped by that of down, which PEFT writes as `base_layer`.
    """
    is_gate_up = module.endswith(_INNER)
    module, width = module.removesuffix(_INNER), rank * (2 if is_gate_up else 1)
    experts = len(a) // width
    a = a.reshape(experts, width, -1)
    b = b.reshape(len(b), width, experts).permute(2, 0, 1)
    half = b.shape[1] // 2
    found = {}
    for number in range(experts):
        if is_gate_up:
            found[f"{module}.{number}.gate_proj"] = a[number], b[number, :half]
            found[f"{module}.{number}.up_proj"] = a[number], b[number, half:]
        else:
            found[f"{module}.{number}.down_proj"] = a[number], b[number]
    return found


def at_tinker(adapter: Adapter, *, interleaved: bool) -> Adapter:
    """Return the adapter with the names and shapes of Tinker, for `tinker_cookbook.weights`."""
    kept = ("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "bias")
    config = {key: adapter.config[key] for key in kept if key in adapter.config}
    tensors = names_of_tinker(adapter.tensors, adapter.rank, interleaved=interleaved)
    return Adapter({**config, "target_modules": "all-linear"}, tensors, adapter.matrices)


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write a PEFT folder."""
    save = library("safetensors.torch").save_file
    tensors = {name: each.contiguous() for name, each in adapter.tensors.items()}
    save(tensors, folder / TENSORS, {"format": "pt"})
    config = json.dumps(dict(adapter.config), indent=2)
    (folder / CONFIG).write_text(f"{config}\n", encoding="utf-8")
