"""Tiny random models of every supported family, written to a folder in seconds and without a hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cotrain_workers.engine.model.families import auto_class
from tests.support.tiny_tokenizers import SPECIAL_TOKENS, trained_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPE: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,  # large enough for clear differences between log-probs
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    # On, as in most hub configs: code that packs sequences must work with it.
    "use_cache": True,
}
GEMMA: Mapping[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}
ROPE_LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# family -> (configuration class, its differences from the other families)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-window": (
        "Qwen3Config",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2": ("Qwen2Config", {}),  # biases on q, k, v
    "llama": ("LlamaConfig", {"rope_parameters": dict(ROPE_LLAMA3)}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
}
#: More families, of which one test each checks everything (`tests/support/families.py`).
PARTIAL: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
MINISTRAL3: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
WINDOWS = ["sliding_attention", "full_attention"]
#: Positions of images in time, height and width.
MROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
GEMMA4: Mapping[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 16,
    "layer_types": WINDOWS,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
}
MULTIPLIED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
MORE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3-wrapped": ("Gemma3Config", {**GEMMA, "layer_types": WINDOWS}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-wrapped": ("Gemma4Config", GEMMA4),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", GEMMA4),
    "gemma4-unified-wrapped": ("Gemma4UnifiedConfig", GEMMA4),
    "phi3": ("Phi3Config", {"sliding_window": 16}),
    "phi4-mini": ("Phi3Config", {"original_max_position_embeddings": 256, "rope_parameters": dict(LONGROPE)}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 16, "layer_types": WINDOWS}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": ("GraniteConfig", {**MULTIPLIED, "logits_scaling": 8.0}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": 16, "layer_types": WINDOWS}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": dict(MINISTRAL3)}),
    "mistral3": ("Mistral3Config", {"head_dim": 16, "rope_parameters": dict(MINISTRAL3)}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16}),
    "cohere": ("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {"sliding_window": 16, "layer_types": WINDOWS}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 16}),
    "nemotron": (  # its squares grow with the fourth power of the weights
        "NemotronConfig",
        {"rope_parameters": dict(PARTIAL), "initializer_range": 0.08},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 16, "layer_types": WINDOWS}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "stablelm": ("StableLmConfig", {"rope_parameters": dict(PARTIAL), "use_qkv_bias": True, "qk_layernorm": True}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 16}),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 9.0, "factor": 1.0}},
    ),
    "hyperclovax": ("HyperCLOVAXConfig", {**MULTIPLIED, "logits_scaling": 0.5}),
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {"head_dim": 16}),
    "cwm": ("CwmConfig", {"head_dim": 16, "sliding_window": 16, "bos_token_id": 1}),
    "nanochat": ("NanoChatConfig", {"final_logit_softcapping": 15.0}),
    "vaultgemma": ("VaultGemmaConfig", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "jais2": ("Jais2Config", {"head_dim": 16}),
    "qwen3-vl": ("Qwen3VLConfig", {"head_dim": 16, "rope_parameters": dict(MROPE)}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", {"rope_parameters": dict(MROPE)}),
}
SIX_EXPERTS: Mapping[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
#: Shared experts, and a first layer without experts.
SHARED: Mapping[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GEMMA4_MIXTURE: Mapping[str, Any] = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
#: Mixtures of experts. The number of experts differs from every rank in use, so that no axis can be mistaken.
MIXTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "qwen2_moe": (  # shared experts, and a first layer without experts
        "Qwen2MoeConfig",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 4}),
    "gpt_oss": (  # biases, sinks, windows, gate and up in turn
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, **SHARED, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, **SHARED, "q_lora_rank": 20, "n_group": 2, "num_mtp_layers": 0}),
    "glm4_moe": ("Glm4MoeConfig", {**SHARED, "head_dim": 16, "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**LATENT, **SHARED, "q_lora_rank": 20}),
    "dots1": ("Dots1Config", {**SHARED, "head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 16, **SIX_EXPERTS}),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 6, "moe_topk": 2}),
    "phimoe": ("PhimoeConfig", dict(SIX_EXPERTS)),
    "granitemoe": ("GraniteMoeConfig", {**SIX_EXPERTS, "logits_scaling": 2.0}),
    "solar_open": ("SolarOpenConfig", {**SHARED, "head_dim": 16}),
    "gemma4-moe": ("Gemma4TextConfig", GEMMA4_MIXTURE),
    "gemma4-moe-wrapped": ("Gemma4Config", GEMMA4_MIXTURE),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            "head_dim": 16,
            "rope_parameters": dict(MROPE),
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
}
HYBRID: Mapping[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # The gated norm of small outputs multiplies rounding errors by up to 1 / sqrt(eps).
    "rms_norm_eps": 1e-2,
}
HYBRID_MIXTURE: Mapping[str, Any] = {
    **HYBRID,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 1e-2,
}
HYBRIDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", HYBRID_MIXTURE),
    "qwen3_5": ("Qwen3_5TextConfig", HYBRID),
    "qwen3_5-wrapped": ("Qwen3_5Config", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", HYBRID_MIXTURE),
    "qwen3_5_moe-wrapped": ("Qwen3_5MoeConfig", HYBRID_MIXTURE),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **MULTIPLIED,
            **SIX_EXPERTS,
            "layer_types": HYBRID["layer_types"],
            "shared_intermediate_size": 40,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoehybrid-dense": (  # without states, and without experts
        "GraniteMoeHybridConfig",
        {
            **MULTIPLIED,
            "num_local_experts": 0,
            "layer_types": ["full_attention", "full_attention"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 40,
            "logits_scaling": 2.0,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": 48, "lm_head_multiplier": 0.25, "mlp_multipliers": [0.5, 2.0]},
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
}
#: All families.
EVERY: Mapping[str, tuple[str, Mapping[str, Any]]] = {**FAMILIES, **MORE, **MIXTURES, **HYBRIDS}
#: Text models of the models with a vision tower.
TEXT_OF: Mapping[str, str] = {
    "Gemma3Config": "gemma3_text",
    "Gemma4Config": "gemma4_text",
    "Gemma4UnifiedConfig": "gemma4_unified_text",
    "Mistral3Config": "ministral3",
    "Qwen3_5Config": "qwen3_5_text",
    "Qwen3_5MoeConfig": "qwen3_5_moe_text",
    "Qwen3VLConfig": "qwen3_vl_text",
    "Qwen3VLMoeConfig": "qwen3_vl_moe_text",
    "Qwen2_5_VLConfig": "qwen2_5_vl_text",
}
TOWER: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
#: Towers of the models that read images. A token is 8 x 8 pixels.
QWEN_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.15,
}
QWEN3_TOWER: Mapping[str, Any] = {
    **QWEN_TOWER,
    "hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3VLConfig": QWEN3_TOWER,
    "Qwen3VLMoeConfig": QWEN3_TOWER,
    "Qwen2_5_VLConfig": {
        **QWEN_TOWER,
        "hidden_size": 32,
        "window_size": 16,  # of 2 x 2 tokens
        "fullatt_block_indexes": [1],
    },
}


def build_tiny(
    family: str,
    folder: Path,
    *,
    tied: bool = False,
    vocab: int = 128,
    hidden: int = 64,
    layers: int = 2,
    context: int = 512,
    seed: int = 0,
) -> Path:
    """Write a random model of `EVERY` family to `folder`; no tokenizer, fp32 safetensors."""
    config_class, own = EVERY[family]
    shape = {
        **SHAPE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        **own,
    }
    chosen = getattr(transformers, config_class)
    if "text_config" in chosen.sub_configs:
        kind = TEXT_OF[config_class]
        shape = {
            "text_config": {**shape, "model_type": kind},
            "vision_config": {**TOWERS.get(config_class, TOWER), "out_hidden_size": hidden},
            "mm_tokens_per_image": 4,
            "image_token_id": 3,
            "image_token_index": 3,
            "tie_word_embeddings": tied,
        }
    config = chosen(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        if tied:
            model.tie_weights()
    model.save_pretrained(folder)
    if config_class in TOWERS:
        write_image_settings(folder)
    return folder


def write_image_settings(folder: Path) -> None:
    """Write the preprocessing of images: 4 to 64 tokens for each of them."""
    Qwen2VLImageProcessorPil(
        patch_size=QWEN_TOWER["patch_size"],
        size={"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)


def build_tiny_qwen3(
    folder: Path,
    *,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    context: int = 512,
    seed: int = 0,
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Write a random Qwen3 model with a real BPE tokenizer and chat template to `folder`.

    The tokenizer is trained on the source text of the standard library; `vocab` is at least 260
    (256 bytes and the special tokens).
    """
    size: Any = {"hidden": hidden, "layers": layers, "context": context}
    build_tiny("qwen3", folder, vocab=vocab, **size, seed=seed)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_tokenizer(vocab)),
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[SPECIAL_TOKENS[1]],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def build_tiny_with_tools(folder: Path) -> Path:
    """Write a random Qwen3 model with a long context, whose chat template has tools, to `folder`."""
    template = (Path(__file__).parent / "tool_template.jinja").read_text()
    return build_tiny_qwen3(folder, context=16_384, template=template)
