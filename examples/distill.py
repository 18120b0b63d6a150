"""On-policy distillation: a student samples, and its teacher scores each token.

The advantage of a token is its log-prob under the teacher minus its log-prob under the student.
This is the gradient of the reverse KL divergence from student to teacher, estimated on the
student's samples. The teacher is a larger adapter on the same base model, trained on answers (see
sft.py).
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import rl
import sft
from opening import counted, opened, options_of, show
from unicode_names import batch, tokens_of

from cotrain import AdamParams, ModelInput, SampledSequence, SamplingClient, SamplingParams, TrainingClient

STEPS = 20
TEACHER_STEPS, TEACHER_RANK, STUDENT_RANK = 40, 16, 8
QUESTIONS, ANSWERS = 16, 2
ADAM = AdamParams(learning_rate=4e-3, eps=1e-8)
EDGE = 3
"""Number of first and last steps that are compared."""


def main() -> None:
    """Train a teacher, distill it into a student, and show the divergence between them."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        teaching = service.create_lora_training_client(base_model, TEACHER_RANK, seed=1)
        tokenizer = teaching.get_tokenizer()
        lessons = sft.train(teaching, tokenizer, TEACHER_STEPS)
        list(counted("Teaching the teacher", lessons, TEACHER_STEPS))
        teacher = teaching.save_weights_and_get_sampling_client()
        run = service.create_lora_training_client(base_model, STUDENT_RANK, seed=2)
        steps = counted("Teaching the student", range(options.steps), options.steps)
        divergences = [distill(run, teacher, tokenizer, step) for step in steps]
    rows = [(f"step {step}", each) for step, each in enumerate(divergences, 1)]
    rows += [
        (f"mean of the first {EDGE}", fmean(divergences[:EDGE])),
        (f"mean of the last {EDGE}", fmean(divergences[-EDGE:])),
    ]
    show("Reverse KL from student to teacher, nats per token", ("when", "KL"), rows, options)


def distill(run: TrainingClient, teacher: SamplingClient, tokenizer: Any, step: int) -> float:
    """Run one step. Return the divergence before it, estimated from the samples."""
    student = run.save_weights_and_get_sampling_client()
    written = write(student, tokenizer, step)
    scored = [  # all at once, then the results, so that the teacher scores them in one batch
        teacher.compute_logprobs(ModelInput.from_ints(prompt + answer.tokens)) for prompt, answer in written
    ]
    data, gaps = [], []
    for (prompt, answer), score in zip(written, scored, strict=True):
        taught = score.result()[len(prompt) :]
        advantages = [theirs - own for theirs, own in zip(taught, answer.logprobs, strict=True)]
        data.append(rl.datum(prompt, answer, advantages))
        gaps += advantages
    passed, stepped = run.forward_backward(data, "importance_sampling"), run.optim_step(ADAM)
    passed.result()
    stepped.result()
    return -fmean(gaps)


def write(student: SamplingClient, tokenizer: Any, step: int) -> list[tuple[list[int], SampledSequence]]:
    """Sample answers of the student. Return each with the tokens of its question."""
    prompts = [tokens_of(tokenizer, pair.question) for pair in batch(step, QUESTIONS)]
    futures = [
        student.sample(
            ModelInput.from_ints(prompt),
            ANSWERS,
            SamplingParams(max_tokens=24, stop="\n", seed=QUESTIONS * step + index),
        )
        for index, prompt in enumerate(prompts)
    ]
    return [
        (prompt, answer)
        for prompt, future in zip(prompts, futures, strict=True)
        for answer in future.result().sequences
    ]


if __name__ == "__main__":
    main()
