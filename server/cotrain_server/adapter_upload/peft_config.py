"""Reader of an uploaded PEFT LoRA adapter: the content of its two files, without the tensor values.

A setting that would compute anything other than `W + scale * B @ A` on the modules adaptable here is refused, and the
error names its key. Plain PEFT and the names of `tinker_cookbook` are supported.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Literal, TypeVar

from cotrain_server.adapter_upload.expert_names import NOTE, PARAMETERS, SHARED, form_of, parameter_path
from cotrain_server.adapter_upload.module_patterns import first_matches
from cotrain_server.adapter_upload.safetensors_header import TensorEntry, named, read_header, read_metadata
from cotrain_server.adapter_upload.strict_json import read_object
from cotrain_server.errors import Invalid
from cotrain_store.bodies.adapter_bodies import PeftAdapter, PeftModule
from cotrain_store.messages.runs import LoraSpec

Family = Literal["attn", "mlp", "unembed"]

Number = TypeVar("Number", int, float)

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

#: Last part of a module's path, and the switch of a run that trains it.
FAMILY_BY_MODULE: Mapping[str, Family] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), "attn"),
    **dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "attn"),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "out_proj", "in_proj_qkv"), "attn"),
    **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a", "in_proj"), "attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "mlp"),
    **dict.fromkeys(("c_fc", "c_proj", "fc1", "fc2", "w1", "w2", "w3"), "mlp"),
    **dict.fromkeys(("input_linear", "output_linear"), "mlp"),
    "lm_head": "unembed",
}
UNEMBED = "lm_head"
#: Ending of `target_parameters` that name the weight of a linear module.
WEIGHT = ".weight"
#: Name in `tinker_cookbook`.
UNEMBED_OF_COOKBOOK = "model.unembed_tokens"

#: Keys that are read below.
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "init_lora_weights", "bias", "ensure_weight_tying", "target_parameters",
}  # fmt: skip
#: Keys for training, for display by other tools, or for module selection, which the tensor names also give.
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
}  # fmt: skip
#: Other methods (PiSSA, OLoRA, LoftQ, CorDA …) also change the weights of the base model.
_INITS_OF_THE_ADAPTER_ALONE = (None, True, False, "gaussian", "orthogonal", "eva")

#: Tensors that PEFT adds by its own decision (`save_embedding_layers`). The worker compares them with its own.
_BASE_WEIGHT = re.compile(
    r"base_model\.model\.(lm_head|model\.(language_model\.)?embed_tokens)(\.base_layer)?\.weight", re.A
)
_ALL_LINEAR = "all-linear"
_MATRIX = re.compile(r"base_model\.model\.(?P<module>[\w.]{1,256})\.lora_(?P<letter>[AB])\.weight", re.A)
#: Patterns with no regular-expression syntax except dots. They are looked up; a separate process matches the others.
_MODULE_ENDING = re.compile(r"\^?\w+(?:\\?\.\w+)*", re.A)


@dataclass(frozen=True)
class _Pattern:
    """Values of modules from `rank_pattern` or `alpha_pattern`. The first matching key applies."""

    key: str
    value_by_pattern: Mapping[str, Any]
    otherwise: Any

    def values(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return the value of each module, as PEFT does (`peft.utils.other.get_pattern_key`)."""
        patterns = list(self.value_by_pattern)
        if all(map(_MODULE_ENDING.fullmatch, patterns)):
            by_ending: dict[str, tuple[int, Any]] = {}
            for number, (ending, value) in enumerate(self.value_by_pattern.items()):
                by_ending.setdefault(ending.replace("\\", ""), (number, value))
            return {module: _first_match(by_ending, module, self.otherwise) for module in modules}
        whole = [rf"(.*\.)?({pattern})$" for pattern in patterns]
        matches = first_matches(f"{CONFIG}: {self.key}", "match", whole, modules)
        return {
            module: self.otherwise if first is None else self.value_by_pattern[patterns[first]]
            for module, first in zip(modules, matches, strict=True)
        }


@dataclass(frozen=True)
class _Config:
    """Fields of `adapter_config.json` that determine the function."""

    ranks: _Pattern
    alphas: _Pattern
    is_rslora: bool
    ties_weights: bool
    targets: frozenset[str] | str | None
    """Names, a regular expression, or None if the tensor names determine the modules."""
    parameters: tuple[str, ...]  # endings of the paths of adapted parameters

    def check_targets(self, tensor_by_module: Mapping[str, str]) -> None:
        """Raise Invalid for a tensor of a module that PEFT would not adapt."""
        if self.targets is None:
            return
        modules = {each.removesuffix(WEIGHT) for each in self.parameters if each.endswith(WEIGHT)}
        tensor_by_module = {
            name: tensor for name, tensor in tensor_by_module.items() if modules.isdisjoint(_endings(name))
        }
        if isinstance(self.targets, str):
            subject = f"{CONFIG}: target_modules"
            names = list(tensor_by_module)
            matches = first_matches(subject, "fullmatch", [self.targets], names)
            left_out = [name for name, each in zip(names, matches, strict=True) if each is None]
        else:
            targets = self.targets
            left_out = [name for name in tensor_by_module if targets.isdisjoint(_endings(name))]
        if left_out:
            raise Invalid(
                f"{named(tensor_by_module[left_out[0]])} is of a module that target_modules of {CONFIG} does not name."
            )


def read_adapter(config: bytes, tensors: bytes, seed: int) -> PeftAdapter:
    """Return the adapter of both files. `seed` initializes parameters that the run trains but the
    files lack. Raises Invalid: the message names the key.
    """
    settings = _read_config(config)
    entries, is_shared = read_header(tensors), read_metadata(tensors).get(NOTE) == SHARED
    is_ours = NOTE in read_metadata(tensors)
    modules, rank = _read_modules(settings, entries, in_halves=is_ours)
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
        per_expert=_has_own_matrices(modules, entries) and not is_shared,
    )
    return PeftAdapter(lora, modules, tensors)


# ---- adapter_config.json -------------------------------------------------------------------------


def _read_config(content: bytes) -> _Config:
    fields = read_object(CONFIG, content)
    _refuse_other_functions(fields)
    if not _is_number(fields.get("lora_alpha")):
        raise Invalid(f"{CONFIG}: lora_alpha must be a number.")
    if not _is_rank(fields.get("r")):
        raise Invalid(f"{CONFIG}: r must be a whole number of 1 or more.")
    return _Config(
        ranks=_pattern(fields, "rank_pattern", _is_rank, fields["r"]),
        alphas=_pattern(fields, "alpha_pattern", _is_number, fields["lora_alpha"]),
        is_rslora=bool(fields.get("use_rslora")),
        ties_weights=bool(fields.get("ensure_weight_tying")),
        targets=_targets(fields.get("target_modules")),
        parameters=_parameters(fields.get("target_parameters")),
    )


def _targets(value: Any) -> frozenset[str] | str | None:
    if isinstance(value, list):
        return frozenset(map(str, value))
    if isinstance(value, str) and value.lower() != _ALL_LINEAR:  # as PEFT compares it
        return value
    return None


def _parameters(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Invalid(f"{CONFIG}: target_parameters must be a list of names.")
    for each in value:
        module = each.removesuffix(WEIGHT)
        if _leaf(each) not in PARAMETERS and (module == each or _leaf(module) not in FAMILY_BY_MODULE):
            known = " and ".join(PARAMETERS)
            raise Invalid(
                f"{CONFIG}: target_parameters names {named(each)}; {known} of experts, and weights of linear "
                "modules, are trained here."
            )
    return tuple(value)


def _refuse_other_functions(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise Invalid(f"{CONFIG}: peft_type must be LORA.")
    if fields.get("bias", "none") != "none":
        raise Invalid(f"{CONFIG}: bias must be none.")
    if fields.get("init_lora_weights") not in _INITS_OF_THE_ADAPTER_ALONE:
        raise Invalid(
            f"{CONFIG}: init_lora_weights names a method that changes the base model's weights, too. "
            "Save the adapter with path_initial_model_for_weight_conversion."
        )
    for key in sorted(fields.keys() - _READ - _WITHOUT_EFFECT):
        if fields[key]:
            raise Invalid(f"{CONFIG}: {named(key)} is not supported; only plain LoRA is.")


def _pattern(fields: Mapping[str, Any], key: str, is_valid: Any, otherwise: Any) -> _Pattern:
    pattern = fields.get(key) or {}
    if not isinstance(pattern, dict) or not all(is_valid(value) for value in pattern.values()):
        raise Invalid(f"{CONFIG}: {key} must map names of modules to numbers.")
    return _Pattern(key, pattern, otherwise)


def _first_match(value_by_ending: Mapping[str, tuple[int, Number]], module: str, otherwise: Number) -> Number:
    # Look up the module's few endings instead of all listed ones: a megabyte of those would take
    # minutes for a megabyte of modules.
    named = [value_by_ending.get(ending) for ending in (f"^{module}", *_endings(module))]
    return min((found for found in named if found), default=(0, otherwise))[1]


def _endings(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31 and isfinite(value)


# ---- adapter_model.safetensors -------------------------------------------------------------------


def _read_modules(
    config: _Config, entries: Mapping[str, TensorEntry], *, in_halves: bool
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
        match form_of(module):
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
        form = form_of(module.name)
        if form in ("parameter", "expert"):
            return True
        outer = module.b if module.name.endswith(".w2") else module.a
        if form == "tinker" and entries[outer].shape[0] != 1:
            return True
    return False


def _family(module: str) -> Family:
    return "mlp" if form_of(module) else FAMILY_BY_MODULE[_leaf(module)]


def _matrix_of(tensor: str, tensor_by_target: dict[str, str], parameters: Sequence[str]) -> tuple[str, str]:
    """Return the module and the letter of a tensor, and record the module as a required target."""
    matched = _MATRIX.fullmatch(tensor)
    if not matched:
        raise Invalid(f"{named(tensor)} cannot be imported: {_advice(tensor)}")
    module, letter = matched.group("module", "letter")
    if module == UNEMBED_OF_COOKBOOK:
        return UNEMBED, letter
    module = parameter_path(module, tensor, parameters)
    if form_of(module) in ("parameter", "tinker"):
        return module, letter
    if _leaf(module) not in FAMILY_BY_MODULE:
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


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
