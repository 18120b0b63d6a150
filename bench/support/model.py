"""Models of the benchmarks: Qwen3 shapes with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

VOCAB = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 that determine its speed."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int  # size of one head
    vocab: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of one layer's q, k, v, o, gate, up and down."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys)]
        mlp = [(self.hidden, self.mlp), (self.hidden, self.mlp), (self.mlp, self.hidden)]
        return [*attention, (queries, self.hidden), *mlp]


@dataclass(frozen=True)
class Mixture(Shape):
    """Sizes of a Qwen3 with experts in every layer; `mlp` is the width of one expert."""

    experts: int
    chosen: int  # experts of each token


SHAPES = {
    "tiny": Shape(2, 64, 96, 4, 2, 16, 128),
    "narrow": Shape(1, 32, 64, 2, 1, 16, VOCAB),
    "5m": Shape(4, 256, 768, 4, 2, 64, VOCAB),
    "small": Shape(3, 512, 1536, 8, 4, 64, VOCAB),
    "0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151_936),
    "4b": Shape(36, 2560, 9728, 32, 8, 128, 151_936),
    "8b": Shape(36, 4096, 12_288, 32, 8, 128, 151_936),
    "32b": Shape(64, 5120, 25_600, 64, 8, 128, 151_936),
    "70b": Shape(80, 8192, 28_672, 64, 8, 128, 128_256),
}
#: Shapes of which only launches and bytes are counted.
MIXTURES = {
    "tiny-moe": Mixture(2, 64, 32, 4, 2, 16, 128, experts=8, chosen=2),
    "30b-a3b": Mixture(48, 2048, 768, 32, 4, 128, 151_936, experts=128, chosen=8),
}


def config_of(shape: Shape) -> Qwen3Config | Qwen3MoeConfig:
    """Return the configuration of a Qwen3 of this shape."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head,
        "vocab_size": shape.vocab, "max_position_embeddings": 32_768, "tie_word_embeddings": False,
    }  # fmt: skip
    if isinstance(shape, Mixture):
        sizes |= {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen}
        return Qwen3MoeConfig(**sizes, moe_intermediate_size=shape.mlp, norm_topk_prob=True)
    return Qwen3Config(**sizes)


def build(folder: Path, size: str = "5m", dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """Write the model to a folder, unless it exists there, and return the folder."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(config_of(SHAPES[size]), dtype=dtype)
        network.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Add a tokenizer with a token for each byte, so that the model accepts text; return the folder."""
    end = "<|im_end|>"
    vocabulary = {byte: at for at, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**vocabulary, end: len(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = f"{{% for m in messages %}}{{{{ m['content'] }}}}{end}{{% endfor %}}"
    fast.save_pretrained(folder)
    return folder
