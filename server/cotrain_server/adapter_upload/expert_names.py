"""Names of the matrices of experts in uploads: PEFT's parameters, one module for each expert, and Tinker's."""

import re
from collections.abc import Sequence
from typing import Literal

from cotrain_server.adapter_upload.safetensors_header import named
from cotrain_server.errors import Invalid

#: Parameters of an experts module in the order in which PEFT wraps them: the first one is innermost.
PARAMETERS = ("gate_up_proj", "down_proj")
_WRAPPER = ".base_layer"
#: Names of Tinker; their matrices have three dimensions.
TINKER = ("w1", "w2", "w3")
_OF_EXPERT = re.compile(r".+\.experts\.\d+\.(gate|up|down)_proj", re.A)
#: Metadata of our own exports.
NOTE, SHARED = "experts", "shared_outer"

Form = Literal["parameter", "expert", "tinker"]


def form_of(module: str) -> Form | None:
    """Return the form of a module of experts, or None for another module."""
    parent, _, leaf = module.rpartition(".")
    if parent.endswith(".experts") and leaf in PARAMETERS:
        return "parameter"
    if parent.endswith(".experts") and leaf in TINKER:
        return "tinker"
    return "expert" if _OF_EXPERT.fullmatch(module) else None


def parameter_path(module: str, tensor: str, parameters: Sequence[str]) -> str:
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
            f"{named(tensor)} is of a parameter of experts that target_parameters of adapter_config.json does not "
            f"name; {' and '.join(PARAMETERS)} can be."
        )
    return wrapped[-1 - depth]
