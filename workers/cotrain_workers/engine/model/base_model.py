"""Loading of a frozen base model, and rejection of models that the engine would compute wrongly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import nn

from cotrain_workers.engine.device import free_host_bytes, is_out_of_memory, unordered_writes
from cotrain_workers.engine.lora.quantized import Quantization, QuantizedLinear, number_of_parameters, quantize
from cotrain_workers.engine.lora.segmented import MultiLoraLinear
from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model import experts, linear_attention
from cotrain_workers.engine.model.activation_checkpointing import Recompute, chunk_rows
from cotrain_workers.engine.model.expert_choice import ExpertChoices
from cotrain_workers.engine.model.families import (
    MODEL_TYPES,
    SHAPED_LAYERS,
    UNEMBED,
    auto_class,
    decoder_path,
    drop_towers,
    logit_factor,
)
from cotrain_workers.engine.model.model_source import (
    CONFIG,
    NoModel,
    UnusableModel,
    model_too_large,
    read_config,
    read_weights,
    refuse_not_finite,
    report,
    unfit_config,
)
from cotrain_workers.engine.model.rotary import ROPES, context_length, fix_frequencies, rope_types
from cotrain_workers.engine.model.vision import Vision, read_processor
from cotrain_workers.engine.routing import Router
from cotrain_workers.engine.spec import Target, has_experts
from cotrain_workers.engine.turns import Alone, LockStep

#: Exceptions that a model raises for an unusable value of its configuration.
_OF_CONTENT = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError,
)  # fmt: skip
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


class UnsupportedModel(UnusableModel, ValueError):
    """The base model cannot be trained here; the message contains the reason."""


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


@dataclass(frozen=True)
class BaseModel:
    """A frozen model whose attention and target modules read their route from `router`."""

    backbone: nn.Module  # (input_ids [1, T], position_ids [1, T]) -> hidden states
    head_weight: torch.Tensor  # [vocabulary, d]; may be the input embedding
    path: str  # of the backbone in the Hugging Face model: "model"
    is_plain: bool  # its layers compute as Llama's (`ModelType.is_plain`)
    query_heads: int
    final_softcap: float | None
    score_softcap: float | None
    has_sinks: bool  # its heads may attend to nothing (gpt-oss)
    targets: tuple[Target, ...]
    router: Router
    recompute: Recompute
    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    num_parameters: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    kv: KvShape
    states: tuple[linear_attention.StateShape, ...]  # of the layers with a state
    lock_step: LockStep
    expert_choices: ExpertChoices | None  # None: no experts, or layers with other numbers of them
    vision: Vision | None = None  # None: it reads text only


def load_base_model(
    model: str, *, device: torch.device, dtype: torch.dtype, local_files_only: bool, quantization: Quantization = "none"
) -> BaseModel:
    """Load a base model by hub id or folder, and quantize the weights of its linear modules if requested.

    Raises:
        UnsupportedModel: its type is not supported.
        NoModel: it does not exist or cannot be read.
        ModelTooLarge: it does not fit into free memory.
    """
    try:
        return _load(model, device, dtype, quantization, local_files_only=local_files_only)
    except UnusableModel as unusable:
        raise type(unusable)(f"Base model {model} cannot be served: {unusable}") from unusable


def _load(
    model: str, device: torch.device, dtype: torch.dtype, quantization: Quantization, *, local_files_only: bool
) -> BaseModel:
    report(f"reading the configuration of base model {model}")
    config = read_config(model, refuse_type, local_files_only=local_files_only)
    refuse_unsupported(config)
    processor = None
    if MODEL_TYPES[config.model_type].reads_images:
        processor = read_processor(model, local_files_only=local_files_only)
    skeleton = make_skeleton(config)
    if processor is None:
        drop_towers(skeleton)
    needed_bytes = skeleton.num_parameters() * dtype.itemsize
    refuse_too_large(needed_bytes)  # quantized after they are read
    names = [each.name for each in find_targets(skeleton) if each.name != UNEMBED]
    if quantization != "none" and has_experts(find_targets(skeleton)):
        raise UnsupportedModel("weights of experts are not quantized: set quantization to none.")
    report(f"loading its weights, {needed_bytes / 1e9:.2g} GB in {str(dtype).removeprefix('torch.')}")
    network = read_weights(model, auto_class(config), dtype=dtype, local_files_only=local_files_only)
    if processor is None:
        drop_towers(network)
    if quantization != "none":
        refuse_not_finite(network.named_parameters())  # NaN would become an integer
        quantize(network, names, quantization)
    try:
        network.to(device).eval().requires_grad_(requires_grad=False)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        raise
    refuse_not_finite((*network.named_parameters(), *network.named_buffers()))
    refuse_failing(network)
    return make_base_model(network, config, Alone(), processor)


@torch.no_grad()
def refuse_failing(network: Any) -> None:
    """Raise NoModel if a pass of two tokens fails because of the configuration, or its results are not finite."""
    count = network.get_input_embeddings().num_embeddings
    # Not the first ids, because the embedding of padding is often zero.
    tokens = torch.tensor([[count // 2, count // 3]], device=network.device)
    try:
        with unordered_writes():  # cumulative sums of hybrids, whose results are not used
            logits = network(input_ids=tokens, use_cache=False).logits
    except (RuntimeError, *_OF_CONTENT) as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        if isinstance(error, RuntimeError) and network.device.type != "cpu":
            raise  # it may be a device error
        raise unfit_config(f"{type(error).__name__}: {error}") from error
    if not torch.isfinite(logits).all():
        raise NoModel("the results of a first pass are not finite: its weights or its configuration are broken.")


def make_base_model(network: Any, config: Any, lock_step: LockStep, processor: Any = None) -> BaseModel:
    """Return a base model with our modules in place; weights may be loaded later (device `meta`).

    With the `processor` of its images it has a vision tower.
    """
    text, backbone = config.get_text_config(), network.get_decoder()
    kind = MODEL_TYPES[text.model_type]
    targets, router = find_targets(network), Router()
    num_parameters = number_of_parameters(network)
    path = decoder_path(network)
    adapt(network, targets, router)
    fix_frequencies(backbone)
    scale_outputs(backbone, logit_factor(kind, text))
    vision = Vision(network, processor, router) if processor is not None else None
    recompute = Recompute(in_tuple=kind.in_tuple)
    recompute.attach(backbone.layers)
    chunk_rows(backbone.layers, router)
    return BaseModel(
        backbone=backbone,
        head_weight=network.lm_head.weight,
        path=path,
        is_plain=kind.is_plain,
        query_heads=text.num_attention_heads,
        final_softcap=getattr(text, "final_logit_softcapping", None),
        score_softcap=getattr(text, "attn_logit_softcapping", None),
        has_sinks=any(name.endswith(".sinks") for name, _ in network.named_parameters()),
        targets=targets,
        router=router,
        recompute=recompute,
        architecture=type(network).__name__,
        vocab_size=network.get_input_embeddings().num_embeddings,
        context_length=context_length(text),
        hidden_size=text.hidden_size,
        num_parameters=num_parameters,
        tied_embeddings=network.lm_head.weight is network.get_input_embeddings().weight,
        eos_token_ids=eos_token_ids(network),
        kv=kv_shape(text, len(attentions(backbone))),
        states=linear_attention.attach(backbone, router),
        lock_step=lock_step,
        expert_choices=experts.choices_of(backbone, text),
        vision=vision,
    )


def scale_outputs(backbone: nn.Module, factor: float) -> None:
    """Multiply the hidden states `[1, T, d]` of a backbone by the model's factor on its logits.

    Each head, LoRA on it and each gradient then have the factor. Factors of published models are powers of two, by
    which no bit is lost.
    """

    def scaled(_module: Any, _given: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    if factor != 1:
        backbone.register_forward_hook(scaled)


def saved_with_adapters(base: BaseModel) -> dict[str, torch.Tensor]:
    """Return the weights, by module, that PEFT may save with an adapter; with sharding only unsharded ones."""
    embedding, name = (base.backbone.get_parameter("embed_tokens.weight"), f"{base.path}.embed_tokens")
    whole = {} if base.lock_step.sharding else {name: embedding}
    if embedding is base.head_weight:
        whole[name] = embedding
    return {UNEMBED: base.head_weight, **whole}


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
        for each in layer_configs(config)
    ]
    others = {layer: shape for layer, shape in enumerate(shapes) if shape != shapes[0]}
    return KvShape(layers, *shapes[0], others)


def attentions(decoder: Any) -> list[Any]:
    """Return the attention modules of a decoder, in the order of layers. Some layers of hybrids have none."""
    found = (getattr(layer, "self_attn", None) for layer in decoder.layers)
    return [each for each in found if each is not None]


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer, or the one of all layers if they do not differ in shape."""
    if config.model_type not in SHAPED_LAYERS:
        return [config]
    if not hasattr(config, "per_layer_config"):
        raise UnsupportedModel(
            "its layers differ in shape, which this release of transformers does not tell: update it."
        )
    return [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]


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


def refuse_too_large(needed_bytes: int) -> None:
    """Raise ModelTooLarge for a model that exceeds this host's memory; the kernel would kill the process silently."""
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        raise model_too_large(needed_bytes, free_bytes)


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
    for rope_type in rope_types(config):
        if rope_type not in ROPES:
            raise UnsupportedModel(
                f"RoPE of type {rope_type!r} (rope_scaling or rope_parameters of its {CONFIG}) is not "
                f"supported; {', '.join(ROPES)} are."
            )
    _refuse_numbers(config)


def _refuse_numbers(whole: Any) -> None:
    """Raise NoModel for an impossible number, which would fail the first pass or make its results not finite."""
    for config, (key, least) in product(layer_configs(whole), LEAST.items()):
        value = getattr(config, key, None)
        # A window of 0 is right where windows are switched off (Qwen2 MoE).
        is_off = key == "sliding_window" and not getattr(config, "use_sliding_window", True)
        if value is None or (value == 0 and is_off):
            continue
        if type(value) not in (int, float) or not isfinite(value) or value < least:
            raise unfit_config(f"{key} must be a number of at least {least}, not {value!r}")
    for config in layer_configs(whole):
        if config.num_attention_heads % config.num_key_value_heads:
            raise unfit_config("num_attention_heads must be a multiple of num_key_value_heads")


def make_skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the model without weights, for weights of `dtype`; raises NoModel."""
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, **({"dtype": dtype} if dtype else {}))
    except Exception as error:
        raise unfit_config(f"{type(error).__name__}: {error}") from error


def find_targets(network: nn.Module) -> tuple[Target, ...]:
    """Return the modules that LoRA can be attached to, in model order; PEFT selects the same by these names.

    Raises:
        UnsupportedModel: a module is not a plain linear, or a name is missing.
    """
    kind = MODEL_TYPES[network.config.get_text_config().model_type]  # type: ignore[union-attr, operator]
    inside = f"{decoder_path(network)}."
    targets: list[Target] = []
    for name, module in network.named_modules():
        if experts.is_experts(module) and name.startswith(inside):
            targets += experts.expert_targets(name, module)
            continue
        family = kind.modules.get(name.rpartition(".")[-1])
        if family is None or not (name == UNEMBED or name.startswith(inside)):
            continue
        if type(module) not in (nn.Linear, QuantizedLinear):
            raise UnsupportedModel(f"{name} is a {type(module).__name__}, not a plain linear.")
        targets.append(Target(name, family, module.in_features, module.out_features))
    found = {target.name.rpartition(".")[-1] for target in targets}
    missing = kind.modules.keys() - kind.optional - found
    if missing:
        raise UnsupportedModel(f"it has no modules named {', '.join(sorted(missing))}.")
    return tuple(targets)


def adapt(network: Any, targets: tuple[Target, ...], router: Router) -> None:
    """Replace linear modules and attention of a loaded model by ours."""
    experts.attach(network, router)
    for target in targets:
        if target.experts:
            continue
        linear = network.get_submodule(target.name)
        if target.name != UNEMBED:
            network.set_submodule(target.name, MultiLoraLinear(linear, target.name, router))
        elif linear.bias is not None:
            raise UnsupportedModel("its unembedding has a bias, which the head does not implement.")
    attn.register()
    decoder = network.get_decoder()
    decoder.set_attn_implementation(attn.PER_SEQUENCE)
    for number, attention in enumerate(attentions(decoder)):
        attn.attach(attention, router, number)
