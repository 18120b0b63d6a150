"""Configuration of a base model: reasons for a refusal, shape of its keys and values, rotary embeddings.

The frequencies of a rotary embedding may not depend on the other sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import product
from math import isfinite
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cotrain_workers.engine.model.families import MODEL_TYPES, SHAPED_LAYERS
from cotrain_workers.engine.model.model_source import CONFIG, NoModel, UnusableModel, unfit_config

#: Value of `use_bidirectional_attention` that lets no text attend to later tokens.
IMAGES_ONLY = "vision"
#: Minimum value of each key of the configuration, if the key is present.
LEAST: Mapping[str, int] = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1,
    "max_position_embeddings": 1, "sliding_window": 1, "rms_norm_eps": 0,
    "query_pre_attn_scalar": 0, "attn_logit_softcapping": 0, "final_logit_softcapping": 0,
    "logit_scale": 0, "logits_scaling": 0,
}  # fmt: skip
#: Rotary embeddings whose frequencies depend on the longest sequence of the batch, and so on other tenants, beyond a
#: first length.
STRETCHED_ROPES = ("dynamic", "longrope")
#: The default is in the code of each model; transformers computes the others.
ROPES = ("default", *ROPE_INIT_FUNCTIONS)


class UnsupportedModel(UnusableModel, ValueError):
    """The base model cannot be trained here; the message contains the reason."""


def refuse_type(kind: str) -> None:
    """Raise UnsupportedModel for a `model_type` that cannot be trained here."""
    if kind not in MODEL_TYPES:
        names = ", ".join(each.title for each in MODEL_TYPES.values())
        raise UnsupportedModel(f"models of type {kind!r} cannot be trained; {names} can.")


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModel if training this model would be wrong or couple tenants."""
    refuse_type(config.model_type)
    refuse_type(config.get_text_config().model_type)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("its weights are quantized; give the 16- or 32-bit model.")
    config = config.get_text_config()
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModel("it clips queries, keys and values (clip_qkv), which no kernel does.")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel("its layers read keys of other layers (num_kv_shared_layers).")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, IMAGES_ONLY):
        raise UnsupportedModel("it attends to later tokens (use_bidirectional_attention).")
    for rope_type in _rope_types(config):
        if rope_type not in ROPES:
            raise UnsupportedModel(
                f"RoPE of type {rope_type!r} (rope_scaling or rope_parameters of its {CONFIG}) is not "
                f"supported; {', '.join(ROPES)} are."
            )
    _refuse_numbers(config)


def _refuse_numbers(whole: Any) -> None:
    """Raise NoModel for an impossible number, which would fail the first pass or make its results not finite."""
    for config, (key, least) in product(_layer_configs(whole), LEAST.items()):
        value = getattr(config, key, None)
        # A window of 0 is right where windows are switched off (Qwen2 MoE).
        is_off = key == "sliding_window" and not getattr(config, "use_sliding_window", True)
        if value is None or (value == 0 and is_off):
            continue
        if type(value) not in (int, float) or not isfinite(value) or value < least:
            raise unfit_config(f"{key} must be a number of at least {least}, not {value!r}")
    for config in _layer_configs(whole):
        if config.num_attention_heads % config.num_key_value_heads:
            raise unfit_config("num_attention_heads must be a multiple of num_key_value_heads")


@dataclass(frozen=True)
class KvShape:
    """KV-cache shape of one token: a key and a value vector per layer and head."""

    layers: int
    heads: int
    head_dim: int
    others: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Heads and head size of the layers whose shape differs, by layer."""

    def of(self, layer: int) -> tuple[int, int]:
        """Return the heads and the head size of a layer."""
        return self.others.get(layer, (self.heads, self.head_dim))

    @property
    def values(self) -> int:
        """Number of values that one token has in all layers."""
        return sum(2 * heads * size for heads, size in map(self.of, range(self.layers)))


def kv_shape(config: Any, layers: int) -> KvShape:
    """Return the size of a token's keys and values in some layers."""
    shapes = [
        (
            each.num_key_value_heads,
            # Latent attention names its whole size apart from that of the rotated part.
            getattr(each, "qk_head_dim", None)
            or getattr(each, "head_dim", None)
            or each.hidden_size // each.num_attention_heads,
        )
        for each in _layer_configs(config)
    ]
    others = {layer: shape for layer, shape in enumerate(shapes) if shape != shapes[0]}
    return KvShape(layers, *shapes[0], others)


def _layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer, or the one of all layers if they do not differ in shape."""
    if config.model_type not in SHAPED_LAYERS:
        return [config]
    if not hasattr(config, "per_layer_config"):
        raise UnsupportedModel(
            "its layers differ in shape, which this release of transformers does not tell: update it."
        )
    return [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]


def context_length(text: Any) -> int:
    """Return the length of the longest sequence, by the configuration of a text model.

    A stretched rotary embedding is used up to its first length, where its frequencies are the same for all.
    """
    firsts = (each.get("original_max_position_embeddings") for each in _ropes(text) if _kind(each) == "longrope")
    lengths: list[int] = [text.max_position_embeddings, *(first for first in firsts if first)]
    return min(lengths)


def _rope_types(config: Any) -> list[str]:
    """Return the types of rotary embedding in a configuration, which may have one per layer type."""
    ropes = _ropes(config)
    for key, value in (item for each in ropes for item in each.items()):
        if isinstance(value, float) and not isfinite(value):
            raise unfit_config(f"{key} of its RoPE must be finite, not {value}")
    return sorted({_kind(each) for each in ropes if each})


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


def eos_token_ids(network: Any) -> tuple[int, ...]:
    """Return the tokens that end a generation according to the model's generation settings."""
    text = getattr(network.config, "text_config", None)
    settings = (getattr(network, "generation_config", None), network.config, text)
    found = (getattr(each, "eos_token_id", None) for each in settings)
    named = next((each for each in found if each is not None), None)
    if named is None:
        return ()
    tokens = named if isinstance(named, list | tuple) else [named]
    if not all(isinstance(each, int) for each in tokens):
        raise NoModel("eos_token_id of its configuration must be one token or a list of tokens.")
    return tuple(sorted(set(tokens)))


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, dict):
        raise unfit_config("rope_parameters must be an object")
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))
