"""Tiny tokenizers of every kind, trained on the source text of the standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS_BYTES = 400_000  # enough for a 4,096-token vocabulary, read in well under a second


@cache
def trained_tokenizer(vocab: int) -> str:
    """Train a byte-level BPE tokenizer of `vocab` tokens and return its JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(standard_library_text(CORPUS_BYTES), trainer)
    return tokenizer.to_str()


@cache
def sentencepiece_tokenizer(vocab: int, *, strips: bool) -> str:
    """Train a BPE tokenizer with byte fallback, as Llama 2's (`strips` its first space) or Gemma's.

    Its first three tokens are <unk>, <s> and </s>, then come the 256 bytes. Returns its JSON.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learned = vocab - 259
    trainer = trainers.BpeTrainer(vocab_size=learned, show_progress=False, limit_alphabet=100)
    trained.train_from_iterator(standard_library_text(CORPUS_BYTES), trainer)
    model = json.loads(trained.to_str())["model"]
    ours = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {token: at for at, token in enumerate(ours)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    replaced = normalizers.Replace(" ", "\u2581")
    first = [normalizers.Prepend("\u2581")] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*first, replaced])
    last = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens(ours[:3])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def standard_library_text(max_bytes: int) -> Iterator[str]:
    """Yield source files of the standard library, in order of name, up to about `max_bytes`."""
    left = max_bytes
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if left <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text
