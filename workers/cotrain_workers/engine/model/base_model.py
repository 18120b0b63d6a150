"""Load a frozen base model and refuse, with the reason, what the engine would compute wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cotrain_workers.engine.device import free_host_bytes, is_out_of_memory
from cotrain_workers.engine.lock_step import Alone, LockStep
from cotrain_workers.engine.lora.segmented import MultiLoraLinear
from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model.activation_checkpointing import Recompute
from cotrain_workers.engine.model.model_source import (
    UnusableModel,
    model_too_large,
    read_config,
    read_weights,
)
from cotrain_workers.engine.progress import report
from cotrain_workers.engine.routing import Router
from cotrain_workers.engine.spec import Family, Target

# model_type of transformers -> how people call it
SUPPORTED: Mapping[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
}
FAMILY_BY_MODULE: Mapping[str, Family] = {
    "q_proj": "attn",
    "k_proj": "attn",
    "v_proj": "attn",
    "o_proj": "attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
    "lm_head": "unembed",
}
UNEMBED = "lm_head"
# Their frequencies depend on the longest sequence of the batch, that is, on a neighbour.
COUPLING_ROPES = ("dynamic", "longrope")


class UnsupportedModel(UnusableModel, ValueError):
    """This base model cannot be trained here; the message says why."""


@dataclass(frozen=True)
class KvShape:
    """What one token leaves in the key-value memory: two vectors per layer and head."""

    layers: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class BaseModel:
    """A frozen model whose attention and target modules read their route from `router`."""

    backbone: nn.Module  # (input_ids [1, T], position_ids [1, T]) -> hidden states
    head_weight: torch.Tensor  # [vocabulary, d]; may be the input embedding
    final_softcap: float | None
    score_softcap: float | None
    targets: tuple[Target, ...]
    router: Router
    recompute: Recompute
    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    kv: KvShape
    lock_step: LockStep


def load_base_model(
    model: str, *, device: torch.device, dtype: torch.dtype, local_files_only: bool
) -> BaseModel:
    """Load a hub id or a folder.

    Raises:
        UnsupportedModel: of a kind that is not trained here.
        NoModel: there is none, or it cannot be read.
        ModelTooLarge: it is larger than the memory that is free.
    """
    try:
        return _load(model, device, dtype, local_files_only=local_files_only)
    except UnusableModel as unusable:
        raise type(unusable)(f"Base model {model} cannot be served: {unusable}") from unusable


def _load(
    model: str, device: torch.device, dtype: torch.dtype, *, local_files_only: bool
) -> BaseModel:
    report(f"reading what base model {model} is")
    config = read_config(model, refuse_type, local_files_only=local_files_only)
    refuse_unsupported(config)
    needed_bytes = make_skeleton(config).num_parameters() * dtype.itemsize
    refuse_too_large(needed_bytes)
    report(
        f"loading its weights, {needed_bytes / 1e9:.2g} GB in {str(dtype).removeprefix('torch.')}"
    )
    network = read_weights(model, dtype=dtype, local_files_only=local_files_only)
    try:
        network.to(device).eval().requires_grad_(requires_grad=False)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        raise
    return make_base_model(network, config, Alone())


def make_base_model(network: Any, config: Any, lock_step: LockStep) -> BaseModel:
    """Put our modules into a model, and say what it is; its weights may still be to come (device `meta`)."""
    targets, router = find_targets(network), Router()
    num_parameters = network.num_parameters()
    adapt(network, targets, router)
    recompute = Recompute()
    recompute.attach(network.model.layers)
    return BaseModel(
        backbone=network.model,
        head_weight=network.lm_head.weight,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        score_softcap=getattr(config, "attn_logit_softcapping", None),
        targets=targets,
        router=router,
        recompute=recompute,
        architecture=type(network).__name__,
        vocab_size=network.get_input_embeddings().num_embeddings,
        context_length=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        num_parameters=num_parameters,
        eos_token_ids=eos_token_ids(network),
        kv=kv_shape(config),
        lock_step=lock_step,
    )


def kv_shape(config: Any) -> KvShape:
    """Return how large a token's keys and values are."""
    head_dim = getattr(config, "head_dim", None)
    return KvShape(
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
    )


def eos_token_ids(network: Any) -> tuple[int, ...]:
    """Return the tokens that end a generation, as the model's generation settings name them."""
    settings = getattr(network, "generation_config", None) or network.config
    named = settings.eos_token_id
    if named is None:
        named = network.config.eos_token_id
    if named is None:
        return ()
    return tuple(sorted({named} if isinstance(named, int) else set(named)))


def refuse_too_large(needed_bytes: int) -> None:
    """Raise ModelTooLarge for a model that this host cannot hold: the kernel would end the process, without a word."""
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        raise model_too_large(needed_bytes, free_bytes)


def refuse_type(kind: str) -> None:
    """Raise UnsupportedModel for a `model_type` that is not trained here."""
    if kind not in SUPPORTED:
        names = ", ".join(SUPPORTED.values())
        raise UnsupportedModel(f"models of type {kind!r} cannot be trained; {names} can.")


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModel if training this model would be wrong or couple tenants."""
    refuse_type(config.model_type)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("its weights are quantized; give the 16- or 32-bit model.")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel("it attends to later tokens (use_bidirectional_attention).")
    for rope_type in rope_types(config):
        if rope_type in COUPLING_ROPES:
            raise UnsupportedModel(
                f"RoPE of type {rope_type!r} depends on the longest sequence of a batch, "
                "so one tenant would change another's results."
            )


def rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding in a config, which may have one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(each["rope_type"]) for each in nested or [rope] if "rope_type" in each}


def make_skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build the model without weights, which will be of `dtype`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **({"dtype": dtype} if dtype else {}))


def find_targets(network: nn.Module) -> tuple[Target, ...]:
    """Return the modules LoRA can be attached to, in model order: those that PEFT chooses by these names.

    Raises:
        UnsupportedModel: one is no plain linear, or none has such a name.
    """
    targets = []
    for name, module in network.named_modules():
        family = FAMILY_BY_MODULE.get(name.rpartition(".")[-1])
        if family is None:
            continue
        if type(module) is not nn.Linear:
            raise UnsupportedModel(f"{name} is a {type(module).__name__}, not a plain linear.")
        targets.append(Target(name, family, module.in_features, module.out_features))
    missing = set(FAMILY_BY_MODULE) - {target.name.rpartition(".")[-1] for target in targets}
    if missing:
        raise UnsupportedModel(f"it has no modules named {', '.join(sorted(missing))}.")
    return tuple(targets)


def adapt(network: Any, targets: tuple[Target, ...], router: Router) -> None:
    """Put our linear modules and our attention into a loaded model."""
    for target in targets:
        linear = network.get_submodule(target.name)
        if target.name != UNEMBED:
            network.set_submodule(target.name, MultiLoraLinear(linear, target.name, router))
        elif linear.bias is not None:
            raise UnsupportedModel("its unembedding has a bias, which the head does not implement.")
    attn.register()
    network.set_attn_implementation(attn.PER_SEQUENCE)
    for number, layer in enumerate(network.model.layers):
        attn.attach(layer.self_attn, router, number)
