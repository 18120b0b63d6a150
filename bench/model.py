"""The model the benches train on: Qwen3 architecture, random weights, no tokenizer needed.

python -m bench.model FOLDER          # 5.2M parameters: hidden 256, 4 layers, vocabulary 4096
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 4096


def build(folder: Path) -> Path:
    """Write the model to a folder, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
