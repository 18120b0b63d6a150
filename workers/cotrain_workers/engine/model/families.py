"""Table of the supported model types: modules that carry LoRA, and the differences from Llama that the engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cotrain_workers.engine.spec import Family

UNEMBED = "lm_head"


def _modules(attn: str, mlp: str) -> Mapping[str, Family]:
    """Return the family of each module name. Tinker's groups: attention, MLP, unembedding."""
    names: dict[str, Family] = dict.fromkeys(attn.split(), "attn")
    return {**names, **dict.fromkeys(mlp.split(), "mlp"), UNEMBED: "unembed"}


APART = "q_proj k_proj v_proj o_proj"
LLAMA = _modules(APART, "gate_proj up_proj down_proj")
UNGATED = _modules(APART, "up_proj down_proj")
# A fused linear is one module, as in PEFT: A is common to its parts.
FUSED_GATE = _modules(APART, "gate_up_proj down_proj")
FUSED = _modules("qkv_proj o_proj", "gate_up_proj down_proj")
# Latent attention. Queries are one product, or two with a narrow one between.
QUERIES = frozenset({"q_proj", "q_a_proj", "q_b_proj"})
LATENT = _modules("q_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj", "gate_proj up_proj down_proj")
# Linear attention (`linear_attention.py`) besides attention.
QWEN3_NEXT = _modules(f"{APART} in_proj_qkvz in_proj_ba out_proj", "gate_proj up_proj down_proj")
QWEN3_5 = _modules(f"{APART} in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj", "gate_proj up_proj down_proj")
MAMBA = _modules(f"{APART} in_proj out_proj", "gate_proj up_proj down_proj")
# PEFT refuses `out_proj` of this type.
FALCON_H1 = _modules(f"{APART} in_proj", "gate_proj up_proj down_proj")
LFM2 = _modules("q_proj k_proj v_proj in_proj out_proj", "w1 w2 w3")
GRANITE_HYBRID = _modules(f"{APART} in_proj out_proj", "input_linear output_linear")
OF_STATES = frozenset({"in_proj", "out_proj"})


@dataclass(frozen=True)
class ModelType:
    """Facts about one `model_type` of transformers."""

    title: str
    modules: Mapping[str, Family] = field(default_factory=lambda: LLAMA)
    """Last part of a module's path, and its family. All of them exist in the model."""
    logit_factor: str = ""
    """Name of the factor on the logits before a softcap, in the configuration; after a `/`, of a divisor."""
    is_wrapper: bool = False
    """True if its text model is another model of this table (`text_config`), next to a vision tower."""
    optional: frozenset[str] = frozenset()  # modules that some models of this type lack
    in_tuple: bool = False  # True if a decoder layer returns its hidden states in a tuple
    reads_images: bool = False  # True if its vision tower is used (`vision.py`); other towers are left out
    is_inner: bool = False  # True if it exists only as the text model of a wrapper
    is_plain: bool = False
    """True if its layers compute as Llama's: results are added to the input unscaled, and norms of heads, if any,
    come right before the rotation. Kernels may then replace rotations and residual additions."""


MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType("Llama", is_plain=True),
    "mistral": ModelType("Mistral", is_plain=True),
    "qwen2": ModelType("Qwen2 and Qwen2.5", is_plain=True),
    "qwen3": ModelType("Qwen3", is_plain=True),
    "gemma": ModelType("Gemma", is_plain=True),
    "gemma2": ModelType("Gemma 2", is_plain=True),
    "gemma3_text": ModelType("Gemma 3 (text)", is_plain=True),
    "gemma3": ModelType("Gemma 3", is_wrapper=True),
    "gemma4_text": ModelType("Gemma 4 (text)"),
    "gemma4": ModelType("Gemma 4", is_wrapper=True),
    "gemma4_unified_text": ModelType("Gemma 4 unified (text)"),
    "gemma4_unified": ModelType("Gemma 4 unified", is_wrapper=True),
    "phi3": ModelType("Phi-3 and Phi-4", FUSED),
    "olmo": ModelType("OLMo"),
    "olmo2": ModelType("OLMo 2"),
    "olmo3": ModelType("OLMo 3"),
    "glm": ModelType("GLM-4 (glm)", FUSED_GATE),
    "glm4": ModelType("GLM-4-0414", FUSED_GATE),
    "smollm3": ModelType("SmolLM3", is_plain=True),
    "granite": ModelType("Granite", logit_factor="/logits_scaling"),
    "ministral": ModelType("Ministral", is_plain=True),
    "ministral3": ModelType("Ministral 3 (text)", is_plain=True),
    "mistral3": ModelType("Mistral Small 3.1 and Ministral 3", is_wrapper=True),
    "seed_oss": ModelType("Seed-OSS", is_plain=True),
    "cohere": ModelType("Command-R and Aya", logit_factor="logit_scale"),
    "cohere2": ModelType("Command-R7B and Command A", logit_factor="logit_scale"),
    "starcoder2": ModelType("StarCoder2", _modules(APART, "c_fc c_proj")),
    "nemotron": ModelType("Nemotron", UNGATED),
    "exaone4": ModelType("EXAONE 4"),
    "helium": ModelType("Helium"),
    "stablelm": ModelType("StableLM"),
    "ernie4_5": ModelType("ERNIE 4.5"),
    "hunyuan_v1_dense": ModelType("Hunyuan (dense)"),
    "hyperclovax": ModelType("HyperCLOVA X", logit_factor="logits_scaling"),
    "apertus": ModelType("Apertus", UNGATED),
    "arcee": ModelType("Arcee AFM", UNGATED),
    "cwm": ModelType("CWM", is_plain=True),
    "nanochat": ModelType("nanochat", _modules(APART, "fc1 fc2")),
    "vaultgemma": ModelType("VaultGemma"),
    "jais2": ModelType("Jais 2", UNGATED),
    "qwen3_vl_text": ModelType("Qwen3-VL (text)", is_inner=True),
    "qwen3_vl": ModelType("Qwen3-VL", is_wrapper=True, reads_images=True),
    "qwen2_5_vl_text": ModelType("Qwen2.5-VL (text)", is_inner=True),
    "qwen2_5_vl": ModelType("Qwen2.5-VL", is_wrapper=True, reads_images=True),
    # Mixtures of experts: gate, up and down of the experts are one target each (`experts.py`).
    "qwen3_moe": ModelType("Qwen3 MoE", is_plain=True),
    "qwen2_moe": ModelType("Qwen2 MoE", is_plain=True),
    "mixtral": ModelType("Mixtral", is_plain=True),
    "olmoe": ModelType("OLMoE"),
    "gpt_oss": ModelType("gpt-oss"),
    "deepseek_v2": ModelType("DeepSeek V2", LATENT, optional=QUERIES),
    "deepseek_v3": ModelType("DeepSeek V3 and Kimi K2", LATENT, optional=QUERIES),
    "glm4_moe": ModelType("GLM-4.5"),
    "glm4_moe_lite": ModelType("GLM-4.7 Flash", LATENT, optional=QUERIES),
    "dots1": ModelType("dots.llm1"),
    "ernie4_5_moe": ModelType("ERNIE 4.5 MoE"),
    "minimax_m2": ModelType("MiniMax M2"),
    "flex_olmo": ModelType("FlexOlmo"),
    "hunyuan_v1_moe": ModelType("Hunyuan (MoE)"),
    "phimoe": ModelType("Phi-3.5-MoE"),
    "granitemoe": ModelType("Granite MoE", logit_factor="/logits_scaling"),
    "solar_open": ModelType("Solar Open"),
    "qwen3_vl_moe_text": ModelType("Qwen3-VL MoE (text)", is_inner=True),
    "qwen3_vl_moe": ModelType("Qwen3-VL MoE", is_wrapper=True, reads_images=True),
    # Hybrids: most layers have a state instead of attention.
    "qwen3_next": ModelType("Qwen3-Next", QWEN3_NEXT),
    "qwen3_5_text": ModelType("Qwen3.5 (text)", QWEN3_5),
    "qwen3_5": ModelType("Qwen3.5", is_wrapper=True),
    "qwen3_5_moe_text": ModelType("Qwen3.5 MoE (text)", QWEN3_5),
    "qwen3_5_moe": ModelType("Qwen3.5 MoE", is_wrapper=True),
    "lfm2": ModelType("LFM2", LFM2),
    "lfm2_moe": ModelType("LFM2 MoE", LFM2),
    "granitemoehybrid": ModelType("Granite 4", GRANITE_HYBRID, "/logits_scaling", optional=OF_STATES),
    "falcon_h1": ModelType("Falcon-H1", FALCON_H1, "lm_head_multiplier", in_tuple=True),
    "bamba": ModelType("Bamba", MAMBA, in_tuple=True),
}  # fmt: skip

#: Types whose layers differ in the shape of keys and values (`per_layer_config`).
SHAPED_LAYERS = ("gemma4_text", "gemma4_unified_text")

#: Last part of a module's path in any of the models, and its family.
FAMILY_BY_MODULE: Mapping[str, Family] = {
    name: family for kind in MODEL_TYPES.values() for name, family in kind.modules.items()
}


def logit_factor(kind: ModelType, config: Any) -> float:
    """Return the factor on the logits of a model, by its configuration."""
    name = kind.logit_factor.removeprefix("/")
    if not name:
        return 1.0
    value = float(getattr(config, name))
    return 1 / value if kind.logit_factor.startswith("/") else value


def auto_class(config: Any) -> Any:
    """Return the class of transformers that reads models of this configuration."""
    # The text class of Qwen3.5 names its modules in another way than the files.
    classes = AutoModelForCausalLM, AutoModelForImageTextToText
    whole = config.model_type in MODEL_TYPES and MODEL_TYPES[config.model_type].is_wrapper
    return next(each for each in classes[:: -1 if whole else 1] if type(config) in each._model_mapping)


def decoder_path(network: Any) -> str:
    """Return the path of the text decoder: `model`, or `model.language_model` in a wrapper."""
    decoder = network.get_decoder()
    names = {id(module): name for name, module in network.named_modules()}
    return str(names[id(decoder)])


def drop_towers(network: Any) -> None:
    """Remove the modules of a wrapper that no text reaches."""
    decoder = network.get_decoder()
    if network.model is not decoder:
        for name, module in list(network.model.named_children()):
            if module is not decoder:
                setattr(network.model, name, None)
