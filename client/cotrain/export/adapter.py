"""A downloaded adapter: PEFT's configuration, its two matrices of each module, and the same in Tinker's form.

PEFT stacks the matrices of all experts of a layer: A is `[experts * rank, inputs]`, expert slowest, and B
`[outputs, rank * experts]`, expert fastest. Gate and up are one matrix pair of twice the rank, whose parameter is
wrapped by that of down, which PEFT writes as `base_layer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed
from cotrain.export.base import library

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
UNEMBED = "lm_head"
_PREFIX = "base_model.model."
#: Ending of the parameter of gate and up, which that of down wraps.
_INNER = ".base_layer"
_EXPERTS = re.compile(r"(?P<module>.+\.experts(\.base_layer)?)")
_MATRIX_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
#: Names of the products of an expert at Tinker.
_GATE, _UP, _DOWN = "w1", "w3", "w2"


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
        for end in _MATRIX_SUFFIXES
    ]
    if halves[0].keys() != halves[1].keys() or len(tensors) != 2 * len(halves[0]):
        raise ExportFailed(f"{TENSORS} holds more than pairs of LoRA matrices")
    matrices: dict[str, tuple[Any, Any]] = {}
    for name, a in halves[0].items():
        b, stack = halves[1][name], _EXPERTS.fullmatch(name)
        matrices |= _split_experts(stack["module"], a, b, int(config["r"])) if stack else {name: (a, b)}
    return Adapter(config, tensors, matrices)


def _split_experts(module: str, a: Any, b: Any, rank: int) -> dict[str, tuple[Any, Any]]:
    """Return the matrices of each expert, from PEFT's form of a parameter of all experts."""
    is_gate_up = module.endswith(_INNER)
    module = module.removesuffix(_INNER)
    a, b = _by_expert(a, b, 2 * rank if is_gate_up else rank)
    half = b.shape[1] // 2
    found = {}
    for number, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
        if is_gate_up:
            found[f"{module}.{number}.gate_proj"] = own_a, own_b[:half]
            found[f"{module}.{number}.up_proj"] = own_a, own_b[half:]
        else:
            found[f"{module}.{number}.down_proj"] = own_a, own_b
    return found


def _by_expert(a: Any, b: Any, width: int) -> tuple[Any, Any]:
    """Return A `[experts, width, inputs]` and B `[experts, outputs, width]` of PEFT's stacked matrices."""
    return a.reshape(-1, width, a.shape[1]), b.reshape(len(b), width, -1).permute(2, 0, 1)


def at_tinker(adapter: Adapter, *, interleaved: bool) -> Adapter:
    """Return the adapter with the names and shapes of Tinker, for `tinker_cookbook.weights`."""
    kept = ("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "bias")
    config = {key: adapter.config[key] for key in kept if key in adapter.config}
    tensors = _tinker_tensors(adapter.tensors, adapter.rank, interleaved=interleaved)
    return Adapter({**config, "target_modules": "all-linear"}, tensors, adapter.matrices)


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write a PEFT folder."""
    save = library("safetensors.torch").save_file
    tensors = {name: each.contiguous() for name, each in adapter.tensors.items()}
    save(tensors, folder / TENSORS, {"format": "pt"})
    config = json.dumps(dict(adapter.config), indent=2)
    (folder / CONFIG).write_text(f"{config}\n", encoding="utf-8")


def _tinker_tensors(tensors: Mapping[str, Any], rank: int, *, interleaved: bool) -> dict[str, Any]:
    """Return the tensors of an adapter file with the names and shapes of Tinker.

    Each product has three-dimensional matrices there, with a first dimension of 1 where the experts share one.
    `interleaved`: the rows of gate and up alternate in the model's weight.
    """
    found = {name: each for name, each in tensors.items() if not _is_of_experts(name)}
    of_a = [name for name in tensors if _is_of_experts(name) and name.endswith(_MATRIX_SUFFIXES[0])]
    for module in (name.removesuffix(_MATRIX_SUFFIXES[0]) for name in of_a):
        a, b = (tensors[f"{module}{end}"] for end in _MATRIX_SUFFIXES)
        for product, pair in _products(module, a, b, rank, interleaved=interleaved):
            name = f"{module.removesuffix(_INNER)}.{product}"
            for end, matrices in zip(_MATRIX_SUFFIXES, pair, strict=True):
                is_shared = bool((matrices == matrices[:1]).all())
                found[f"{name}{end}"] = matrices[:1] if is_shared else matrices
    return found


def _products(module: str, a: Any, b: Any, rank: int, *, interleaved: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each product with A `[experts, rank, inputs]` and B `[experts, outputs, rank]`."""
    is_down = not module.endswith(_INNER)
    a, b = _by_expert(a, b, rank if is_down else 2 * rank)
    if is_down:
        yield _DOWN, (a, b)
        return
    half = b.shape[1] // 2
    rows = (slice(half), slice(half, None))
    if interleaved:
        rows = slice(0, None, 2), slice(1, None, 2)
    yield _GATE, (a[:, :rank], b[:, rows[0], :rank])
    yield _UP, (a[:, rank:], b[:, rows[1], rank:])


def _is_of_experts(name: str) -> bool:
    return _EXPERTS.fullmatch(name.rsplit(".lora_", 1)[0]) is not None
