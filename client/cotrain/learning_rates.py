"""Learning rates: a first value by base model, and schedules.

The rule is the published one of Tinker's documentation (Supervised learning, *Hyperparameters*):
`5e-5 * 10 * (2000 / hidden_size) ** p` with p = 0.0775 for Qwen and 0.781 for Llama. The factor 10 of LoRA over
full fine-tuning, and the independence of the rank with a scale of `alpha / rank`, are results of
*LoRA Without Regret* (Thinking Machines Lab, 2025).
"""

import json
from collections.abc import Callable
from math import cos, pi
from pathlib import Path

from cotrain.errors import UnsupportedInput

__all__ = ["constant", "cosine", "get_lr", "linear"]

FULL, LORA_FACTOR, REFERENCE_SIZE, REFERENCE_ALPHA = 5e-5, 10.0, 2000, 32.0
EXPONENTS = {"qwen": 0.0775, "llama": 0.781}
HIDDEN_SIZES = {
    "Qwen/Qwen3-0.6B": 1024,
    "Qwen/Qwen3-1.7B": 2048,
    "Qwen/Qwen3-4B": 2560,
    "Qwen/Qwen3-4B-Instruct-2507": 2560,
    "Qwen/Qwen3-8B": 4096,
    "Qwen/Qwen3-14B": 5120,
    "Qwen/Qwen3-32B": 5120,
    "Qwen/Qwen2.5-0.5B-Instruct": 896,
    "Qwen/Qwen2.5-1.5B-Instruct": 1536,
    "Qwen/Qwen2.5-3B-Instruct": 2048,
    "Qwen/Qwen2.5-7B-Instruct": 3584,
    "meta-llama/Llama-3.2-1B": 2048,
    "meta-llama/Llama-3.2-3B": 3072,
    "meta-llama/Llama-3.1-8B": 4096,
    "meta-llama/Llama-3.1-70B": 8192,
}


def get_lr(base_model: str, rank: int = 32, *, alpha: float = 32.0, hidden_size: int | None = None) -> float:
    """Return a learning rate to begin with, for AdamW on a LoRA adapter.

    `base_model` is a name or a folder. The rank does not change the rate, because an adapter is scaled by
    `alpha / rank`. The first changes are proportional to `alpha`, so the rate is divided by `alpha / 32`.
    Raises UnsupportedInput for a family without a published exponent, or an unknown `hidden_size`.
    """
    if rank < 1 or alpha <= 0:
        raise UnsupportedInput(f"rank must be at least 1 and alpha above 0, not {rank} and {alpha:g}")
    family, size = _family_and_size(base_model)
    if family not in EXPONENTS:
        raise UnsupportedInput(
            f"no learning rate is published for {base_model}; begin a sweep around "
            f"{FULL * LORA_FACTOR * REFERENCE_ALPHA / alpha:g}"
        )
    size = hidden_size or size
    if not size:
        raise UnsupportedInput(f"the hidden size of {base_model} is unknown here: pass hidden_size")
    scale = (REFERENCE_SIZE / size) ** EXPONENTS[family]
    return float(FULL * LORA_FACTOR * scale * REFERENCE_ALPHA / alpha)


def _family_and_size(base_model: str) -> tuple[str, int]:
    """Return the family of EXPONENTS, or "", and the hidden size, or 0."""
    config = Path(base_model) / "config.json"
    if config.is_file():
        read = json.loads(config.read_text(encoding="utf-8"))
        family, size = str(read.get("model_type", "")), int(read.get("hidden_size") or 0)
    else:
        name = base_model.partition(":")[0]
        family = name.rpartition("/")[2].lower()
        size = HIDDEN_SIZES.get(name) or HIDDEN_SIZES.get(name.removesuffix("-Instruct"), 0)
    return next((each for each in EXPONENTS if family.startswith(each)), ""), size


def constant(step: int, steps: int, *, warmup: int = 0) -> float:
    """Return the factor of a constant rate: it grows linearly in the first `warmup` steps, and is then 1.

    `step` counts from 0, so a warmup begins with `1 / warmup` and no step is wasted.
    """
    _check(step, steps, warmup)
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def linear(step: int, steps: int, *, warmup: int = 0, least: float = 0.0) -> float:
    """Return the factor of a rate that falls linearly from 1 to `least` after the warmup."""
    return _decayed(step, steps, warmup, least, lambda done: 1.0 - done)


def cosine(step: int, steps: int, *, warmup: int = 0, least: float = 0.0) -> float:
    """Return the factor of a rate that falls from 1 to `least` along half a cosine after the warmup."""
    return _decayed(step, steps, warmup, least, lambda done: 0.5 * (1.0 + cos(pi * done)))


def _decayed(step: int, steps: int, warmup: int, least: float, shape: Callable[[float], float]) -> float:
    if step < warmup:
        return constant(step, steps, warmup=warmup)
    _check(step, steps, warmup)
    return least + (1.0 - least) * shape((step - warmup) / max(1, steps - warmup))


def _check(step: int, steps: int, warmup: int) -> None:
    if not 0 <= step < steps or not 0 <= warmup <= steps:
        raise UnsupportedInput(
            f"step must be 0 to steps - 1, and warmup 0 to steps; step is {step}, steps {steps}, warmup {warmup}"
        )
