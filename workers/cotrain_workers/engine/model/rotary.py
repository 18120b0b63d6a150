"""Rotary embeddings of a base model, with frequencies that no other sequence of a batch changes."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from math import isfinite
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cotrain_workers.engine.model.model_source import unfit_config

# Beyond a first length, their frequencies depend on the longest sequence of the batch, and so on other tenants.
STRETCHED_ROPES = ("dynamic", "longrope")
#: The default is in the code of each model; transformers computes the others.
ROPES = ("default", *ROPE_INIT_FUNCTIONS)


def fix_frequencies(backbone: nn.Module) -> None:
    """Keep the frequencies of stretched rotary embeddings at those of the first length (`context_length`).

    transformers would choose them at each call, by the longest sequence of the batch.
    """
    for module in backbone.modules():
        kind: Any = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(each in STRETCHED_ROPES for each in kinds):
            plain = MethodType(unwrap(type(module).forward), module)
            module.forward = torch.no_grad()(plain)


def context_length(text: Any) -> int:
    """Return the length of the longest sequence, by the configuration of a text model.

    A stretched rotary embedding is used up to its first length, where its frequencies are the same for all.
    """
    firsts = (each.get("original_max_position_embeddings") for each in _ropes(text) if _kind(each) == "longrope")
    lengths: list[int] = [text.max_position_embeddings, *(first for first in firsts if first)]
    return min(lengths)


def rope_types(config: Any) -> list[str]:
    """Return the types of rotary embedding in a configuration, which may have one per layer type."""
    ropes = _ropes(config)
    for key, value in (item for each in ropes for item in each.items()):
        if isinstance(value, float) and not isfinite(value):
            raise unfit_config(f"{key} of its RoPE must be finite, not {value}")
    return sorted({_kind(each) for each in ropes if each})


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, dict):
        raise unfit_config("rope_parameters must be an object")
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))
