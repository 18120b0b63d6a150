"""Reinforcement learning with a verifiable reward: the policy learns only from the rewards of its
answers.

A question is `int('7') == `, and its answer can be checked. Each step samples a group of answers to
every digit. The advantage of an answer is its reward relative to its group. The next step samples
from the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, pstdev
from typing import Any

from opening import counted, opened, options_of, show
from unicode_names import tokens_of

from cotrain import (
    AdamParams,
    Datum,
    Future,
    ModelInput,
    SampledSequence,
    SamplingClient,
    SamplingParams,
    TrainingClient,
)

STEPS = 32
RANK, ANSWERS = 16, 32
ADAM = AdamParams(learning_rate=2e-3, eps=1e-8)
PASSES = 2
"""Optimizer steps per sampling step; `ppo` clips the updates of the later ones."""
EDGE = 3
"""Number of first and last steps that are compared."""


def main() -> None:
    """Train a policy and show its mean reward."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        run = service.create_lora_training_client(base_model, RANK, seed=1)
        tokenizer = run.get_tokenizer()
        rewards = []
        sampler = run.save_weights_and_get_sampling_client()
        for step in counted("Learning from its own samples", range(options.steps), options.steps):
            answered = list(answers(sampler, tokenizer, step))
            rewards.append(fmean(reward for *_, group in answered for reward in group))
            sampler = learn(run, [datum for each in answered for datum in datums(*each)])
    first, last = fmean(rewards[:EDGE]), fmean(rewards[-EDGE:])
    rows = [(f"step {step}", reward) for step, reward in enumerate(rewards, 1)]
    rows = rows if options.json else rows[:: max(1, len(rows) // 10)]
    rows += [(f"mean of the first {EDGE}", first), (f"mean of the last {EDGE}", last)]
    show("Mean reward, of 1", ("when", "reward"), rows, options)


def answers(
    sampler: SamplingClient, tokenizer: Any, step: int
) -> Iterator[tuple[list[int], list[SampledSequence], list[float]]]:
    """Sample a group of answers to every digit. Yield question, answers and their rewards."""
    prompts = [tokens_of(tokenizer, f"int('{digit}') == ") for digit in range(10)]
    futures = [  # all requests before the first result, so that the server batches them
        sampler.sample(
            ModelInput.from_ints(prompt), ANSWERS, SamplingParams(max_tokens=4, stop="\n", seed=10 * step + digit)
        )
        for digit, prompt in enumerate(prompts)
    ]
    for digit, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        group = future.result().sequences
        yield prompt, group, [reward(tokenizer.decode(each.tokens), digit) for each in group]


def reward(text: str, digit: int) -> float:
    """Return 1 for the digit and the end of the line, and 0.5 for a right start."""
    if text == f"{digit}\n":
        return 1.0
    return 0.5 if text.startswith(str(digit)) else 0.0


def datums(prompt: list[int], group: list[SampledSequence], rewards: list[float]) -> list[Datum]:
    """Weight every answer by its advantage, in standard deviations of its group."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    if not deviation:
        return []  # equal rewards have no advantage
    return [
        datum(prompt, each, [(reward - mean) / deviation] * len(each.tokens))
        for each, reward in zip(group, rewards, strict=True)
    ]


def datum(prompt: list[int], answer: SampledSequence, advantages: list[float]) -> Datum:
    """Make a datum of an answer; the question has no advantage, so it is not trained on."""
    tokens, before = prompt + answer.tokens, [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + (answer.logprobs or []),
            "advantages": before + advantages,
        },
    )


def learn(
    run: TrainingClient,
    data: list[Datum],
    adam: AdamParams = ADAM,
    passes: int = PASSES,
    clip: dict[str, float] | None = None,
) -> SamplingClient:
    """Train on answers and return a sampler of the new weights.

    All is sent at once and keeps its order: a pass, its step, …, the sampler.
    """
    sent: list[Future[Any]] = []
    for _ in range(passes if data else 0):
        sent += [run.forward_backward(data, "ppo", clip), run.optim_step(adam)]
    sampler = run.save_weights_and_get_sampling_client()
    for each in sent:
        each.result()
    return sampler


if __name__ == "__main__":
    main()
