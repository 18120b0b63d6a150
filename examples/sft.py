"""Supervised fine-tuning: teach a base model to answer, and test it on unseen questions.

Only the answers have weights; the questions are context. Both requests of a step are sent together,
and the next step is sent before the results of this one are awaited. So the server never waits for
this script.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opening import counted, opened, options_of, show
from unicode_names import batch, datums, holdout, tokens_of

from cotrain import AdamParams, ModelInput, SamplingClient, SamplingParams, TrainingClient

STEPS = 80
RANK = 16
ADAM = AdamParams(learning_rate=3e-3, eps=1e-8)
SHOWN_EVERY = 10


def main() -> None:
    """Train an adapter. Show its loss during training, and its answers before and after."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        run = service.create_lora_training_client(base_model, RANK, seed=1)
        tokenizer = run.get_tokenizer()
        answered = [answers(service.create_sampling_client(base_model=base_model), tokenizer)]
        unseen = datums(tokenizer, holdout())
        before = run.forward(unseen, "cross_entropy")
        steps = train(run, tokenizer, options.steps)
        losses = list(counted("Training", steps, options.steps))
        after = run.forward(unseen, "cross_entropy")
        rows = [
            ("held out, before", before.result().loss),
            *((f"step {step}", loss) for step, loss in enumerate(losses, 1)),
            ("held out, after", after.result().loss),
        ]
        answered.append(answers(run.save_weights_and_get_sampling_client(), tokenizer))
    if not options.json:
        rows = [row for at, row in enumerate(rows) if at % SHOWN_EVERY == 0 or row is rows[-1]]
        show("What it answers", ("before", "after"), list(zip(*answered, strict=True)), options)
    show("Nats per token of an answer", ("when", "loss"), rows, options)


def train(run: TrainingClient, tokenizer: Any, steps: int) -> Iterator[float]:
    """Train `steps` steps, one step ahead of the results. Yield the loss of each."""
    upcoming = send_step(run, tokenizer, 0)
    for step in range(1, steps + 1):
        passed, stepped = upcoming
        if step < steps:
            upcoming = send_step(run, tokenizer, step)
        yield passed.result().loss
        stepped.result()  # raises if the step failed; the result has no fields of interest


def send_step(run: TrainingClient, tokenizer: Any, step: int) -> tuple[Any, Any]:
    """Send both requests of a step, so that they share a clock cycle. Return their futures."""
    data = datums(tokenizer, batch(step))
    return run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)


def answers(sampler: SamplingClient, tokenizer: Any) -> list[str]:
    """Ask about a few held-out characters."""
    params = SamplingParams(max_tokens=32, stop="\n", temperature=0.0)
    asked = [pair.question for pair in holdout()[:4]]
    prompts = [ModelInput.from_ints(tokens_of(tokenizer, question)) for question in asked]
    sampled = [sampler.sample(prompt, 1, params) for prompt in prompts]
    return [
        question + tokenizer.decode(future.result().sequences[0].tokens).strip()
        for question, future in zip(asked, sampled, strict=True)
    ]


if __name__ == "__main__":
    main()
