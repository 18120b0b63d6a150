"""Tiny model for chats: with Qwen3's special tokens, its template, and some correct answers.

It is trained, in seconds, to answer with a number and to end its turn. So its samples differ, end,
and are sometimes correct, and a reinforcement learning program has something to learn from.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.tiny_models import build_tiny
from tests.support.tiny_tokenizers import CORPUS_BYTES, SPECIAL_TOKENS, standard_library_text

VOCAB = 512
CONTEXT = 4096
STEPS, BATCH, LEARNING_RATE = 60, 8, 3e-3
#: In the order of their ids. Tokens 0 and 2 are the pad and the end token of the model.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TURNS, MAX_CHARACTERS = 3, 100
HEARD = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
#: Answers of the model to any prompt: numbers in the forms that programs look for.
SAYINGS = ("{long}", "\\boxed{{{short}}}", "Guess: {long}")


def build_chat_model(folder: Path) -> Path:
    """Write the model, its tokenizer and its template to `folder`."""
    build_tiny("qwen3", folder, vocab=VOCAB, context=CONTEXT, hidden=64, layers=2)
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        teach(model, tokenizer)
    model.save_pretrained(folder)
    return folder


def build_seeing_model(folder: Path) -> Path:
    """Write a random model that reads images, with a tokenizer of its markup, to `folder`."""
    build_tiny("qwen3-vl", folder, vocab=VOCAB + 8, context=256)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def chat_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that splits digits, as Qwen's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKUP_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(standard_library_text(CORPUS_BYTES), trainer)
    tokenizer.add_tokens(list(MARKUP_TOKENS))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[SPECIAL_TOKENS[1]],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def teach(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Train all weights on random conversations, with a loss on the answers only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = random.Random(0)
    text = "".join(standard_library_text(CORPUS_BYTES))
    for _ in range(STEPS):
        rows = [conversation(generator, text, tokenizer) for _ in range(BATCH)]
        longest = max(len(tokens) for tokens, _ in rows)
        ids, labels = (
            torch.tensor([row[part] + [fill] * (longest - len(row[part])) for row in rows])
            for part, fill in ((0, 0), (1, -100))
        )  # [rows, tokens] each; a row does not attend to what follows it
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def conversation(
    generator: random.Random, text: str, tokenizer: transformers.PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Make random turns with random answers. Return the tokens, and the targets (or -100)."""
    tokens: list[int] = []
    labels: list[int] = []
    for _ in range(generator.randint(1, MAX_TURNS)):
        start = generator.randrange(len(text) - MAX_CHARACTERS)
        asked = text[start : start + generator.randint(10, MAX_CHARACTERS)]
        heard = tokenizer.encode(HEARD.format(asked))
        said = tokenizer.encode(f"{answer(generator)}<|im_end|>")
        tokens += heard + said
        labels += [-100] * len(heard) + said
    return tokens, labels


def answer(generator: random.Random) -> str:
    """Return a random saying with a random number."""
    number = {"short": generator.randint(2, 3), "long": generator.randint(0, 999)}
    return generator.choice(SAYINGS).format(**number)
