"""A tokenizer for the benches' model: a token for each byte, so that text can be sent at all."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def add_tokenizer(folder: Path) -> Path:
    """Write it into a model's folder, and return that."""
    vocabulary = {byte: at for at, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**vocabulary, END: len(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
