"""`adapter_config.json` of an uploaded PEFT adapter: ranks, scales and selected modules.

A setting that would compute anything other than `W + scale * B @ A` on the modules adaptable here is refused, and the
error names its key. A tenant's regular expressions are matched in a process that can be ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, TypeVar

from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable
from cotrain_server.http.request_body import MANY, count_json
from cotrain_server.parser import ChildProcess

Family = Literal["attn", "mlp", "unembed"]

Number = TypeVar("Number", int, float)

CONFIG = "adapter_config.json"

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
#: Parameters of an experts module in the order in which PEFT wraps them: the first one is innermost.
PARAMETERS = ("gate_up_proj", "down_proj")
#: Ending of `target_parameters` that name the weight of a linear module.
_WEIGHT = ".weight"

#: Keys that are read below.
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "init_lora_weights", "bias", "ensure_weight_tying", "target_parameters",
}  # fmt: skip
#: Keys without effect here: of training, of other tools' displays, and of a selection that the tensor names repeat.
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
}  # fmt: skip
#: Other methods (PiSSA, OLoRA, LoftQ, CorDA …) also change the weights of the base model.
_INITS_OF_THE_ADAPTER_ALONE = (None, True, False, "gaussian", "orthogonal", "eva")

_ALL_LINEAR = "all-linear"
#: Patterns with no regular-expression syntax except dots. They are looked up; a separate process matches the others.
_MODULE_ENDING = re.compile(r"\^?\w+(?:\\?\.\w+)*", re.A)

#: Processor time to match; ordinary patterns take milliseconds. Python's `re` may run without end for a short pattern, and
#: holds the interpreter's lock while it does.
_CPU_S = 1.0
_MAX_PATTERNS = 1000


def read_config(content: bytes) -> Config:
    """Return the configuration in a file. Raises Invalid: the message names the key."""
    fields = read_object(CONFIG, content)
    _refuse_other_functions(fields)
    if not _is_number(fields.get("lora_alpha")):
        raise Invalid(f"{CONFIG}: lora_alpha must be a number.")
    if not _is_rank(fields.get("r")):
        raise Invalid(f"{CONFIG}: r must be a whole number of 1 or more.")
    return Config(
        ranks=_module_values(fields, "rank_pattern", _is_rank, fields["r"]),
        alphas=_module_values(fields, "alpha_pattern", _is_number, fields["lora_alpha"]),
        is_rslora=bool(fields.get("use_rslora")),
        ties_weights=bool(fields.get("ensure_weight_tying")),
        targets=_targets(fields.get("target_modules")),
        parameters=_parameters(fields.get("target_parameters")),
    )


@dataclass(frozen=True)
class Config:
    """Fields of `adapter_config.json` that determine the function."""

    ranks: ModuleValues
    alphas: ModuleValues
    is_rslora: bool
    ties_weights: bool
    targets: frozenset[str] | str | None
    """Names, a regular expression, or None if the tensor names determine the modules."""
    parameters: tuple[str, ...]  # endings of the paths of adapted parameters

    def check_targets(self, tensor_by_module: Mapping[str, str]) -> None:
        """Raise Invalid for a tensor of a module that PEFT would not adapt."""
        if self.targets is None:
            return
        modules = {each.removesuffix(_WEIGHT) for each in self.parameters if each.endswith(_WEIGHT)}
        tensor_by_module = {
            name: tensor for name, tensor in tensor_by_module.items() if modules.isdisjoint(_endings(name))
        }
        if isinstance(self.targets, str):
            subject = f"{CONFIG}: target_modules"
            names = list(tensor_by_module)
            matches = _match_in_process(subject, "fullmatch", [self.targets], names)
            left_out = [name for name, each in zip(names, matches, strict=True) if each is None]
        else:
            targets = self.targets
            left_out = [name for name in tensor_by_module if targets.isdisjoint(_endings(name))]
        if left_out:
            raise Invalid(
                f"{named(tensor_by_module[left_out[0]])} is of a module that target_modules of {CONFIG} does not name."
            )


@dataclass(frozen=True)
class ModuleValues:
    """Ranks or alphas of modules. The first matching pattern applies."""

    key: str  # `rank_pattern` or `alpha_pattern`
    value_by_pattern: Mapping[str, Any]
    otherwise: Any  # value of modules without a matching pattern

    def values(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return the value of each module, as PEFT does (`peft.utils.other.get_pattern_key`)."""
        patterns = list(self.value_by_pattern)
        if all(map(_MODULE_ENDING.fullmatch, patterns)):
            by_ending: dict[str, tuple[int, Any]] = {}
            for number, (ending, value) in enumerate(self.value_by_pattern.items()):
                by_ending.setdefault(ending.replace("\\", ""), (number, value))
            return {module: _first_match(by_ending, module, self.otherwise) for module in modules}
        whole = [rf"(.*\.)?({pattern})$" for pattern in patterns]
        matches = _match_in_process(f"{CONFIG}: {self.key}", "match", whole, modules)
        return {
            module: self.otherwise if first is None else self.value_by_pattern[patterns[first]]
            for module, first in zip(modules, matches, strict=True)
        }


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
        module = each.removesuffix(_WEIGHT)
        if leaf_of(each) not in PARAMETERS and (module == each or leaf_of(module) not in FAMILY_BY_MODULE):
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


def _module_values(fields: Mapping[str, Any], key: str, is_valid: Any, otherwise: Any) -> ModuleValues:
    pattern = fields.get(key) or {}
    if not isinstance(pattern, dict) or not all(is_valid(value) for value in pattern.values()):
        raise Invalid(f"{CONFIG}: {key} must map names of modules to numbers.")
    return ModuleValues(key, pattern, otherwise)


def _first_match(value_by_ending: Mapping[str, tuple[int, Number]], module: str, otherwise: Number) -> Number:
    # Look up the module's few endings instead of all listed ones: a megabyte of those would take
    # minutes for a megabyte of modules.
    found = [value_by_ending.get(ending) for ending in (f"^{module}", *_endings(module))]
    return min(filter(None, found), default=(0, otherwise))[1]


def _endings(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31 and isfinite(value)


def _match_in_process(
    subject: str, method: Literal["match", "fullmatch"], patterns: Sequence[str], names: Sequence[str]
) -> list[int | None]:
    """Return the result of `first_matches`, from a process with limits on memory and processor time.

    `subject` begins the sentence that refuses the patterns. Raises Invalid.
    """
    if len(patterns) > _MAX_PATTERNS:
        raise Invalid(f"{subject} has more than {_MAX_PATTERNS} regular expressions.")
    child = ChildProcess(_CPU_S)
    try:
        return child.run(first_matches, method, patterns, names)
    except (re.error, OverflowError, RecursionError) as wrong:
        raise Invalid(f"{subject} contains an invalid regular expression.") from wrong
    except BodyTooLarge as slow:
        raise Invalid(
            f"{subject}: its regular expressions take too long to match; give names of modules, or simpler ones."
        ) from slow
    finally:
        child.stop()


def first_matches(method: str, patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return for each name the number of the first pattern that fits by this method of `re`, or None."""
    matches = [getattr(re.compile(pattern), method) for pattern in patterns]
    return [next((number for number, fits in enumerate(matches) if fits(name)), None) for name in names]


def read_object(subject: str, content: bytes) -> dict[str, Any]:
    """Return a JSON object with unique names, limited depth and no extensions. Raises Invalid with `subject`."""
    try:
        text = content.decode()  # only UTF-8, although json.loads would detect others
        count_json(content, MANY)
        value = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse)
    except (ValueError, Unreadable, BodyTooLarge) as error:
        raise Invalid(f"{subject} is not readable JSON.") from error
    if not isinstance(value, dict):
        raise Invalid(f"{subject} is not a JSON object.")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def named(name: str) -> str:
    """Return an uploaded name in printable ASCII of at most 200 characters."""
    return ascii(name)[1:-1][:200]


def leaf_of(path: str) -> str:
    """Return the last part of the path of a module or parameter."""
    return path.rpartition(".")[2]
