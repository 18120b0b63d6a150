"""A piece of work under whichever official SDK is first on the path, told so that it can be repeated.

Run as `python -m tests.conformance.same_work BASE_URL BASE_MODEL four_steps` from the root.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.sampling_scenarios import prompt, sample, sampler_of, told
from tests.conformance.scenarios import Bench, Facts, batch, logprobs, run_named, step

LORA: dict[str, Any] = {"rank": 4, "seed": 7}
LEARNING_RATE = 1e-2
SAMPLING: dict[str, Any] = {"max_tokens": 8, "seed": 3, "stop": []}
SAMPLES = 3


def four_steps(bench: Bench) -> Facts:
    """Train four pipelined steps, keep the weights, sample from them and score a prompt."""
    run, data = bench.run(**LORA), batch()
    steps = [step(run, data, LEARNING_RATE) for _ in range(4)]
    sampler = sampler_of(run)
    return {
        "lora": LORA,
        "learning_rate": LEARNING_RATE,
        "sampling": SAMPLING,
        "prompt": prompt().to_ints(),
        "inputs": [datum.model_input.to_ints() for datum in data],
        "targets": [datum.loss_fn_inputs["target_tokens"].tolist() for datum in data],
        "losses": [loss.metrics["loss:sum"] for loss, _ in steps],
        "grad_norms": [optim.metrics["grad_norm"] for _, optim in steps],
        "logprobs": logprobs(steps[-1][0]),
        "weights": run.save_state("last").result().path,
        "samples": told(sample(sampler, SAMPLES, **SAMPLING)),
        "scores": list(sampler.compute_logprobs(prompt()).result()),
    }


if __name__ == "__main__":
    run_named(globals())
