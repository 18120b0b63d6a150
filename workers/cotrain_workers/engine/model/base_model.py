"""Frozen base model: loading, our modules in place of its own, and passes over sequences in one packed row."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import nn

from cotrain_workers.engine.coordination import Alone, LockStep
from cotrain_workers.engine.device import is_out_of_memory, to_device, unordered_writes
from cotrain_workers.engine.host import free_host_bytes
from cotrain_workers.engine.lora.quantized import Quantization, QuantizedLinear, number_of_parameters, quantize
from cotrain_workers.engine.lora.segmented import MultiLoraLinear
from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model import experts, linear_attention
from cotrain_workers.engine.model.activation_checkpointing import Recompute, chunk_rows
from cotrain_workers.engine.model.configuration import (
    KvShape,
    UnsupportedModel,
    context_length,
    eos_token_ids,
    fix_frequencies,
    kv_shape,
    refuse_type,
    refuse_unsupported,
)
from cotrain_workers.engine.model.expert_choice import ExpertChoices
from cotrain_workers.engine.model.families import (
    MODEL_TYPES,
    UNEMBED,
    auto_class,
    decoder_path,
    drop_towers,
    logit_factor,
)
from cotrain_workers.engine.model.model_source import (
    NoModel,
    UnusableModel,
    model_too_large,
    read_config,
    read_weights,
    refuse_not_finite,
    report,
    unfit_config,
)
from cotrain_workers.engine.model.vision import Vision, read_processor
from cotrain_workers.engine.routing import Prompt, Router
from cotrain_workers.engine.spec import Target, has_experts

#: Exceptions that a model raises for an unusable value of its configuration.
_OF_CONTENT = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError,
)  # fmt: skip


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
            raise model_too_large(device=device.type) from error
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
            raise model_too_large(device=network.device.type) from error
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
    _adapt(network, targets, router)
    fix_frequencies(backbone)
    _scale_outputs(backbone, logit_factor(kind, text))
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
        kv=kv_shape(text, len(_attentions(backbone))),
        states=linear_attention.attach(backbone, router),
        lock_step=lock_step,
        expert_choices=experts.choices_of(backbone, text),
        vision=vision,
    )


def _scale_outputs(backbone: nn.Module, factor: float) -> None:
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


def _attentions(decoder: Any) -> list[Any]:
    """Return the attention modules of a decoder, in the order of layers. Some layers of hybrids have none."""
    found = (getattr(layer, "self_attn", None) for layer in decoder.layers)
    return [each for each in found if each is not None]


def refuse_too_large(needed_bytes: int) -> None:
    """Raise ModelTooLarge for a model that exceeds this host's memory; the kernel would kill the process silently."""
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        raise model_too_large(needed_bytes, free_bytes)


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


def _adapt(network: Any, targets: tuple[Target, ...], router: Router) -> None:
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
    for number, attention in enumerate(_attentions(decoder)):
        attn.attach(attention, router, number)


@dataclass(frozen=True)
class TokenRow:
    """Some sequences side by side, and filler sequences up to the padded length `T`."""

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], from 0 in each sequence, or from the end of its prompt; with images `[3, T]`
    lengths: Sequence[int]  # of the sequences, filler included
    prompts: Mapping[int, Prompt]  # shared ones, by the index of the sequence


def token_row(
    slices: Iterable[Iterable[np.ndarray]], padded_tokens: int, shared: Iterable[Sequence[int]] = ()
) -> TokenRow:
    """Put the sequences of some slices into one row of `padded_tokens`, which filler completes.

    `shared` holds, for each slice, the first tokens of each sequence whose rows are those of an earlier sequence.
    """
    sequences: list[np.ndarray] = []
    prompts: dict[int, Prompt] = {}
    rows = first = 0
    for op_slice, prompt_lengths in zip(slices, chain(shared, repeat(())), strict=False):
        for tokens, prompt in zip(op_slice, chain(prompt_lengths, repeat(0)), strict=False):
            if prompt:
                prompts[len(sequences)] = Prompt(first, prompt)
            else:
                first = rows
            sequences.append(tokens[prompt:])
            rows += len(tokens) - prompt
    if rows < padded_tokens:
        sequences.append(np.zeros(padded_tokens - rows, np.int64))
    lengths = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    for at, shared_rows in prompts.items():
        starts[at] -= shared_rows.length
    ids = np.concatenate(sequences)
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    return TokenRow(ids, positions, lengths, prompts)


def hidden_states(base: BaseModel, row: TokenRow) -> torch.Tensor:
    """Return the last hidden states `[1, T, d]`. The router must have the row's route."""
    device = base.head_weight.device
    return run_backbone(base, to_device(row.ids, device)[None], to_device(row.positions, device)[..., None, :])


def run_backbone(base: BaseModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Map token ids `[1, T]` and positions, `[1, T]` or `[3, 1, T]`, to the last hidden states `[1, T, d]`.

    The router must have their route.
    """
    output = base.backbone(
        input_ids=ids,
        position_ids=positions,
        # Given a mask of four dimensions, transformers builds none (looking for packed sequences, it
        # would wait for the device). Its values are not used: the route has the sequences.
        attention_mask=ids.new_zeros(1, 1, 1, 1),
        use_cache=False,  # with a cache transformers would not see the packing
    )
    hidden: torch.Tensor = output.last_hidden_state
    return hidden
