"""Base model of the demo: a small Qwen3 with its own tokenizer, trained for half a minute.

The demo uses no model hub. It makes the files of a hub model: a byte-level BPE tokenizer with a
chat template, and weights trained on the texts of the demo.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_texts import BASE_KINDS, base_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

transformers.utils.logging.disable_progress_bar()  # the demo prints its own progress

VOCAB = 1024
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
STEPS, ROWS, LENGTH = 300, 8, 128
LEARNING_RATE, MUON_LEARNING_RATE = 4e-3, 0.02
MOMENTUM, WEIGHT_DECAY = 0.95, 0.01
NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DONE = "demo.json"


def cached_model(folder: Path, on_step: Callable[[int, int, float], None]) -> Path:
    """Return the folder of the base model. Make it if this recipe has not been made there.

    `on_step(step, steps, loss)` is called with the progress of the training.
    """
    recipe = _recipe()
    done = folder / DONE
    if done.is_file() and json.loads(done.read_text()) == recipe:
        return folder
    tokenizer = _train_tokenizer()
    model = _train_model(tokenizer, on_step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made in a temporary folder and moved: a demo that is stopped or runs twice leaves no partial
    # model.
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        made = Path(aside) / "model"
        tokenizer.save_pretrained(made)
        model.save_pretrained(made)
        (made / DONE).write_text(json.dumps(recipe))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def tokenizer_of(folder: Path) -> Callable[[str], list[int]]:
    """Return the function from text to token ids of a model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def write_on(folder: Path, prompt: str, num_tokens: int) -> str:
    """Continue a prompt with the base model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(0)
    written = model.generate(tokens, max_new_tokens=num_tokens, do_sample=True, temperature=0.7, pad_token_id=0)
    return str(tokenizer.decode(written[0]))


def _recipe() -> dict[str, str | int]:
    """Return all settings that change the model: its shape, its training and its text."""
    text = hashlib.sha256("".join(text for kind in BASE_KINDS for text in base_text(kind)).encode())
    recipe = f"{VOCAB} {SHAPE} {STEPS} {ROWS} {LENGTH} {LEARNING_RATE} {MUON_LEARNING_RATE} {CHAT_TEMPLATE}"
    return {"recipe": recipe, "text": text.hexdigest()}


def _train_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator((p for kind in BASE_KINDS for p in base_text(kind)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[SPECIAL_TOKENS[1]],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _train_model(tokenizer: PreTrainedTokenizerFast, on_step: Callable[[int, int, float], None]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=2, pad_token_id=0, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    # Muon needs about half as much text as AdamW alone, so the training takes half the time.
    optimizers = [Muon(matrices, MUON_LEARNING_RATE), torch.optim.AdamW(others, LEARNING_RATE, betas=(0.9, 0.95))]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, _share_of_rate) for o in optimizers]
    for step, rows in enumerate(_batches(tokenizer), start=1):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        on_step(step, STEPS, loss.item())
    return model


def _share_of_rate(step: int) -> float:
    """Return the factor of the learning rate: warm-up, constant, then decay to zero."""
    return min((step + 1) / 10, 1.0, 2.0 * (STEPS - step) / STEPS)


def _batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[torch.Tensor]:
    """Yield `STEPS` batches [rows, tokens], each of all kinds of text in equal parts."""
    streams = [torch.tensor(_tokens(tokenizer, base_text(kind))) for kind in BASE_KINDS]
    starts = random.Random(0)
    for _ in range(STEPS):
        rows = []
        for row in range(ROWS):
            stream = streams[row % len(streams)]
            start = starts.randrange(len(stream) - LENGTH)
            rows.append(stream[start : start + LENGTH])
        yield torch.stack(rows)


def _tokens(tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]) -> list[int]:
    encoded = tokenizer(list(texts), add_special_tokens=False).input_ids
    return [token for ids in encoded for token in (*ids, 0)]


class Muon(torch.optim.Optimizer):
    """Momentum optimizer with orthogonalized updates: every direction moves by the same amount.

    Accepts only matrices, [rows, columns]. Matrices of the same shape are processed together. torch's own Muon computes
    in bf16, which takes seconds per step on a CPU without bf16 instructions.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Run one step at the rate of the schedule."""
        (group,) = self.param_groups
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            by_shape[matrix.shape].append(matrix)
        for (rows, columns), matrices in by_shape.items():
            moved = torch.stack([self._momentum(matrix, matrix.grad) for matrix in matrices])
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            for matrix, direction in zip(matrices, orthogonal(moved), strict=True):
                matrix.mul_(1 - group["lr"] * WEIGHT_DECAY).sub_(direction, alpha=rate)

    def _momentum(self, matrix: torch.Tensor, grad: Any) -> torch.Tensor:
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(matrix)
        state["mean"].lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(state["mean"], MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of each matrix [n, rows, columns] near 1, by Newton-Schulz."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT  # the smaller Gram matrix costs less
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
