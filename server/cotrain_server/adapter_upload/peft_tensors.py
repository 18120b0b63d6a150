"""`adapter_model.safetensors` of an uploaded PEFT LoRA adapter: its modules, without the tensor values and without torch.

Names of plain PEFT and of `tinker_cookbook` are supported. Experts have their matrices as PEFT's parameters, as one module
for each expert, or as Tinker's.

The format is an 8-byte length, a JSON header `{name: {dtype, shape, data_offsets}}` of that length, and the tensors'
bytes. Every byte belongs to exactly one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Literal

from cotrain_server.adapter_upload.peft_config import (
    CONFIG,
    FAMILY_BY_MODULE,
    PARAMETERS,
    Config,
    Family,
    leaf_of,
    named,
    read_config,
    read_object,
)
from cotrain_server.errors import Invalid
from cotrain_store.bodies.adapter_bodies import PeftAdapter, PeftModule
from cotrain_store.messages.runs import LoraSpec

TENSORS = "adapter_model.safetensors"
_UNEMBED = "lm_head"
#: Name in `tinker_cookbook`.
_UNEMBED_OF_COOKBOOK = "model.unembed_tokens"

#: Tensors that PEFT adds by its own decision (`save_embedding_layers`). The worker compares them with its own.
_BASE_WEIGHT = re.compile(
    r"base_model\.model\.(lm_head|model\.(language_model\.)?embed_tokens)(\.base_layer)?\.weight", re.A
)
_MATRIX = re.compile(r"base_model\.model\.(?P<module>[\w.]{1,256})\.lora_(?P<letter>[AB])\.weight", re.A)

_WRAPPER = ".base_layer"
#: Names of Tinker; their matrices have three dimensions.
_TINKER = ("w1", "w2", "w3")
_OF_EXPERT = re.compile(r".+\.experts\.\d+\.(gate|up|down)_proj", re.A)
#: Metadata of our own exports.
_NOTE, _SHARED = "experts", "shared_outer"

_Form = Literal["parameter", "expert", "tinker"]

MAX_HEADER_BYTES = 1_000_000
MAX_DIMENSIONS = 8
BYTES_BY_DTYPE: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


def read_adapter(config: bytes, tensors: bytes, seed: int) -> PeftAdapter:
    """Return the adapter of both files. Raises Invalid: the message names the key or the tensor.

    `seed` initializes parameters that the run trains but the files lack.
    """
    settings = read_config(config)
    entries, metadata = read_header(tensors)
    modules, rank = _read_modules(settings, entries, in_halves=_NOTE in metadata)
    families = {_family(module.name) for module in modules}
    if settings.ties_weights and "unembed" in families:
        raise Invalid(
            f"{CONFIG}: ensure_weight_tying is not supported where lm_head is adapted: it adapts the embedding as well."
        )
    lora = LoraSpec(
        rank=rank,
        seed=seed,
        train_attn="attn" in families,
        train_mlp="mlp" in families,
        train_unembed="unembed" in families,
        per_expert=_has_own_matrices(modules, entries) and metadata.get(_NOTE) != _SHARED,
    )
    return PeftAdapter(lora, modules, tensors)


def _read_modules(
    config: Config, entries: Mapping[str, TensorEntry], *, in_halves: bool
) -> tuple[tuple[PeftModule, ...], int]:
    """Return the modules, and the largest of their ranks. If they are `in_halves`, gate and up have half of a rank."""
    tensor_by_matrix: dict[tuple[str, str], str] = {}
    tensor_by_target: dict[str, str] = {}  # named as in the file
    for tensor in entries:
        if _BASE_WEIGHT.fullmatch(tensor):
            continue
        matrix = _matrix_of(tensor, tensor_by_target, config.parameters)
        if matrix in tensor_by_matrix:
            raise Invalid(f"{named(tensor)} occurs twice, under two names.")
        tensor_by_matrix[matrix] = tensor
    names = list(dict.fromkeys(module for module, _ in tensor_by_matrix))
    if not names:
        raise Invalid(f"{TENSORS} holds no LoRA matrices.")
    config.check_targets(tensor_by_target)
    ranks, alphas = config.ranks.values(names), config.alphas.values(names)
    modules, largest = [], 0
    for module in names:
        a, b = (_matrix(tensor_by_matrix, module, letter) for letter in "AB")
        rank, alpha = ranks[module], alphas[module]
        shapes = entries[a].shape, entries[b].shape
        halved = in_halves and module.endswith(".experts.gate_up_proj")
        match _form_of(module):
            case "parameter":
                _check_stacked_rank(rank, a, shapes[0][:1])
                _check_stacked_rank(rank, b, shapes[1][1:])
                if halved and rank % 2:
                    raise Invalid(f"{named(a)} has rank {rank}, which gate and up cannot share.")
            case "tinker":
                _check_rank(rank, a, shapes[0][1:2])
                _check_rank(rank, b, shapes[1][2:])
            case _:
                _check_rank(rank, a, shapes[0][:1])
                _check_rank(rank, b, shapes[1][1:])
        scale = alpha / sqrt(rank) if config.is_rslora else alpha / rank
        modules.append(PeftModule(module, a, b, scale, halved))
        largest = max(largest, rank // 2 if halved else rank)
    return tuple(modules), largest


def _has_own_matrices(modules: Sequence[PeftModule], entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if some experts do not share the matrix on the model's width."""
    for module in modules:
        form = _form_of(module.name)
        if form in ("parameter", "expert"):
            return True
        outer = module.b if module.name.endswith(".w2") else module.a
        if form == "tinker" and entries[outer].shape[0] != 1:
            return True
    return False


def _family(module: str) -> Family:
    return "mlp" if _form_of(module) else FAMILY_BY_MODULE[leaf_of(module)]


def _matrix_of(tensor: str, tensor_by_target: dict[str, str], parameters: Sequence[str]) -> tuple[str, str]:
    """Return the module and the letter of a tensor, and record the module as a required target."""
    matched = _MATRIX.fullmatch(tensor)
    if not matched:
        raise Invalid(f"{named(tensor)} cannot be imported: {_advice(tensor)}")
    module, letter = matched.group("module", "letter")
    if module == _UNEMBED_OF_COOKBOOK:
        return _UNEMBED, letter
    module = _parameter_path(module, tensor, parameters)
    if _form_of(module) in ("parameter", "tinker"):
        return module, letter
    if leaf_of(module) not in FAMILY_BY_MODULE:
        known = ", ".join(FAMILY_BY_MODULE)
        raise Invalid(f"{named(tensor)} cannot be imported: LoRA is trained here on {known}.")
    tensor_by_target.setdefault(module, tensor)
    return module, letter


def _advice(tensor: str) -> str:
    if ".base_layer." in tensor or "lora_" not in tensor:
        return (
            "these are weights of the base model. Save the adapter with save_embedding_layers=False "
            "and without modules_to_save."
        )
    return "only lora_A.weight and lora_B.weight of linear modules can."


def _matrix(tensor_by_matrix: Mapping[tuple[str, str], str], module: str, letter: str) -> str:
    tensor = tensor_by_matrix.get((module, letter))
    if tensor is None:
        raise Invalid(f"lora_{letter}.weight of {named(module)} is missing.")
    return tensor


def _check_rank(rank: int, tensor: str, found: Sequence[int]) -> None:
    if list(found) != [rank]:
        raise Invalid(f"{named(tensor)} has rank {list(found)}, but {CONFIG} says {rank}.")


def _check_stacked_rank(rank: int, tensor: str, found: Sequence[int]) -> None:
    """Raise Invalid unless a dimension has the rank of each expert."""
    if len(found) != 1 or found[0] == 0 or found[0] % rank:
        raise Invalid(
            f"{named(tensor)} has {list(found)} ranks of all experts, which is no multiple of {rank} in {CONFIG}."
        )


def _form_of(module: str) -> _Form | None:
    """Return the form of a module of experts, or None for another module."""
    parent, _, leaf = module.rpartition(".")
    if parent.endswith(".experts") and leaf in PARAMETERS:
        return "parameter"
    if parent.endswith(".experts") and leaf in _TINKER:
        return "tinker"
    return "expert" if _OF_EXPERT.fullmatch(module) else None


def _parameter_path(module: str, tensor: str, parameters: Sequence[str]) -> str:
    """Return the path of the parameter of a wrapped experts module; other modules are returned as they are.

    `parameters` are `target_parameters` of the configuration. Raises Invalid if they do not name it.
    """
    experts = module
    while experts.endswith(_WRAPPER):
        experts = experts.removesuffix(_WRAPPER)
    if not experts.endswith(".experts"):
        return module
    wrapped = [
        f"{experts}.{each}"
        for each in PARAMETERS
        if any(f".{experts}.{each}".endswith(f".{ending}") for ending in parameters)
    ]
    depth = module.count(_WRAPPER)
    if depth >= len(wrapped):
        raise Invalid(
            f"{named(tensor)} is of a parameter of experts that target_parameters of {CONFIG} does not "
            f"name; {' and '.join(PARAMETERS)} can be."
        )
    return wrapped[-1 - depth]


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int  # in bytes from the end of the header


def read_header(content: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the entries of the tensors, and the metadata of the file.

    Raises Invalid: the file is incomplete, its tensors overlap or leave gaps, or a dtype is not in BYTES_BY_DTYPE.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if not 2 <= length <= MAX_HEADER_BYTES or start > len(content):
        raise Invalid(f"{TENSORS} is not a safetensors file, or is cut short.")
    header = read_object(f"The header of {TENSORS}", content[_LENGTH_BYTES:start])
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Invalid(f"The metadata of {TENSORS} is not a map of texts.")
    entries = {name: _entry(named(name), fields) for name, fields in header.items()}
    _check_cover(entries, len(content) - start)
    return entries, metadata


def _entry(name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise Invalid(f"{name} is not described by dtype, shape and data_offsets.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BYTES_BY_DTYPE:
        raise Invalid(f"{name} is not F64, F32, F16 or BF16.")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise Invalid(f"{name} has an impossible shape.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise Invalid(f"{name} has impossible data_offsets.")
    begin, end = offsets
    if end - begin != prod(shape) * BYTES_BY_DTYPE[dtype]:
        raise Invalid(f"{name} has data_offsets that do not match its shape.")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**48 for each in value)


def _check_cover(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Check that the tensors are contiguous and fill the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise Invalid(f"{named(name)} overlaps another tensor, or leaves a gap before it.")
        position = entry.end
    if position != size:
        raise Invalid(f"The size of {TENSORS} does not match its header.")
