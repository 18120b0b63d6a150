"""Evaluation with `asyncio.gather`: all questions are sent at once, to the base model and to an
adapter.

`sample_async` sends its request when it is called, so the server has all requests before the first
result is awaited, and it generates many answers in each pass. The score of an answer is the share
of the name's words that are right before the first wrong one.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from statistics import fmean
from typing import Any

import sft
from opening import counted, opened, options_of, show
from unicode_names import Pair, holdout, tokens_of

from cotrain import ModelInput, SampleResponse, SamplingClient, SamplingParams, ServiceClient, Submitted

STEPS = 60
ANSWERS = 8


def main() -> None:
    """Train an adapter a little, and compare it with its base model."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        rows = asyncio.run(compare(service, base_model, options.steps))
    columns = ("sampled from", "mean score", f"best of {ANSWERS}", "seconds", "samples")
    show("How much of a character's name is right", columns, rows, options)


async def compare(service: ServiceClient, base_model: str, steps: int) -> list[tuple[str, float, float, float, int]]:
    """Evaluate the base model and a briefly trained adapter concurrently."""
    run = await service.create_lora_training_client_async(base_model, sft.RANK, seed=1)
    tokenizer = await asyncio.to_thread(run.get_tokenizer)
    # Training as in sft.py blocks, so it runs in its own thread and not in the event loop.
    training = counted("Training", sft.train(run, tokenizer, steps), steps)
    await asyncio.to_thread(list, training)
    base = await service.create_sampling_client_async(base_model=base_model)
    trained = await run.save_weights_and_get_sampling_client_async()
    return list(
        await asyncio.gather(
            evaluate("the base model", base, tokenizer), evaluate(f"{steps} steps later", trained, tokenizer)
        )
    )


async def evaluate(name: str, sampler: SamplingClient, tokenizer: Any) -> tuple[str, float, float, float, int]:
    """Ask all questions at once. Return a row of the table."""
    started_at = time.monotonic()
    answered = await asyncio.gather(
        *[ask(sampler, tokenizer, pair, seed).result_async() for seed, pair in enumerate(holdout())]
    )
    took_s = time.monotonic() - started_at
    scores = [
        [score(tokenizer.decode(each.tokens), pair) for each in response.sequences]
        for pair, response in zip(holdout(), answered, strict=True)
    ]
    mean = fmean(fmean(group) for group in scores)
    return name, mean, fmean(max(group) for group in scores), took_s, ANSWERS * len(scores)


def ask(sampler: SamplingClient, tokenizer: Any, pair: Pair, seed: int) -> Submitted[SampleResponse]:
    """Send one question. Awaiting the result yields a future; awaiting that yields the answers."""
    return sampler.sample_async(
        ModelInput.from_ints(tokens_of(tokenizer, pair.question)),
        ANSWERS,
        SamplingParams(max_tokens=24, stop="\n", seed=seed, temperature=0.7),
    )


def score(text: str, pair: Pair) -> float:
    """Compute the share of words that are right before the first wrong one."""
    right = pair.answer.split()
    same = takewhile(lambda both: both[0] == both[1], zip(text.split(), right, strict=False))
    return len(list(same)) / len(right)


if __name__ == "__main__":
    main()
