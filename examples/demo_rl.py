"""Reinforcement learning: a policy that learns only from the rewards of its answers.

The task is small enough to check by eye: continue `int('4') == ` with `4` and the end of the line.
Every step samples a group of answers to each question and rewards each answer. The advantage of an
answer is its reward relative to its group. The next step samples from the new weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import rl
from demo_tenants import targets

from cotrain import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient

KEY = "tml-eve_key-of-the-demo"
STEPS = 32
DIGITS = "12345"
QUESTIONS, ANSWERS = 15, 16
"""Questions per step, and answers per question."""
PASSES = 3
"""Optimizer steps per sampling step.

More than one requires a clipped loss: under `importance_sampling`, whose ratio is unbounded, two of
three seeds forgot what they had learned.
"""
CLIP = {"clip_high_threshold": 3.0}
"""A good answer may become three times as likely in a step, not 1.2 times, because it is rare at
first."""
RANK, ADAM = 16, AdamParams(learning_rate=4e-3, eps=1e-8)
EDGE = 5
"""Number of first and last steps that the claim compares."""
MARGIN = 0.3
"""Minimum rise of the mean reward between them; it rises by about 0.6."""


@dataclass
class Learning:
    """Progress of the policy."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each finished step."""
    seconds: float = 0.0
    latest: str = ""
    """One question of the last step with one of its answers."""

    @property
    def at_first(self) -> float:
        """Mean reward of the first steps."""
        return fmean(self.rewards[:EDGE])

    @property
    def at_last(self) -> float:
        """Mean reward of the last steps."""
        return fmean(self.rewards[-EDGE:])


def reinforce(address: str, base_model: str, learning: Learning, on_step: Callable[[], None], seed: int = 1) -> None:
    """Train a policy on its own samples. Fills `learning` and calls `on_step` after each step."""
    started_at, digits = time.monotonic(), random.Random(seed)
    with ServiceClient(address, KEY) as service:
        run = service.create_lora_training_client(base_model, RANK, seed, **targets("attn", "mlp"))
        tokenizer = run.get_tokenizer()
        sampler = run.save_weights_and_get_sampling_client()
        for _ in range(STEPS):
            asked = [digits.choice(DIGITS) for _ in range(QUESTIONS)]
            data = _rewarded_answers(sampler, tokenizer, asked, learning)
            if data:
                sampler = rl.learn(run, data, ADAM, PASSES, CLIP)
            learning.seconds = time.monotonic() - started_at
            on_step()


def plot(learning: Learning, path: Path) -> None:
    """Draw reward by step into a PNG."""
    # Imported here, because its first import on a machine scans every font.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(learning.rewards) + 1), learning.rewards, marker=".")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="int('4') == …")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _rewarded_answers(sampler: SamplingClient, tokenizer: Any, asked: list[str], learning: Learning) -> list[Datum]:
    """Sample answers to every question, and make datums of the informative ones."""
    prompts = [tokenizer.encode(_question(digit), add_special_tokens=False) for digit in asked]
    first_seed = len(learning.rewards) * QUESTIONS  # makes the samples reproducible
    futures = [
        sampler.sample(ModelInput.from_ints(prompt), ANSWERS, SamplingParams(max_tokens=4, stop="\n", seed=seed))
        for seed, prompt in enumerate(prompts, start=first_seed)
    ]
    data, all_rewards = [], []
    for digit, prompt, future in zip(asked, prompts, futures, strict=True):
        response = future.result()
        texts = [tokenizer.decode(sequence.tokens) for sequence in response.sequences]
        rewards = [_reward(text, digit) for text in texts]
        all_rewards += rewards
        data += rl.datums(prompt, response.sequences, rewards)
        learning.latest = f"{_question(digit)}{texts[0]!r}"
    learning.rewards.append(fmean(all_rewards))
    return data


def _question(digit: str) -> str:
    return f"int('{digit}') == "


def _reward(text: str, digit: str) -> float:
    """Return 1 for the right line, 0.5 for a right start, and a little for any line of one digit."""
    if text == f"{digit}\n":
        return 1.0
    if text.startswith(digit):
        return 0.5
    return 0.2 if len(text) == 2 and text[0].isdigit() and text[1] == "\n" else 0.0
