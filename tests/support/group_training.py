"""Training of some runs with the official SDK.

`python -m tests.support.group_training ADDRESS KEY` prints the answers. With `sample` behind them, it
only samples.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

RUNS = ((8, True), (2, True), (4, False))
STEPS = 5


def batch(number: int) -> list[types.Datum]:
    """Make one short datum."""
    tokens = [(number * 7 + at * 3) % 500 for at in range(6 + number % 5)]
    inputs: Any = {"target_tokens": [*tokens[1:], 1], "weights": [1.0] * len(tokens)}
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)]


def train(service: tinker.ServiceClient) -> list[Any]:
    """Train runs concurrently, with every step sent before any result is awaited, and save them."""
    runs = [
        service.create_lora_training_client("tiny", rank=rank, seed=rank, train_mlp=mlp).result() for rank, mlp in RUNS
    ]
    numbers = []
    for step in range(STEPS):
        begun = [
            (
                each.forward_backward(batch(step + at), "cross_entropy"),
                each.optim_step(types.AdamParams(learning_rate=1e-2)),
            )
            for at, each in enumerate(runs)
        ]
        numbers += [[loss.result().metrics["loss:sum"], step_of(optim)] for loss, optim in begun]
    for saved in [each.save_state("last") for each in runs]:
        saved.result()
    return numbers


def step_of(optim: Any) -> Any:
    """Wait for an optimizer step. Return the norm of its gradient."""
    return optim.result().metrics["grad_norm"]


def sample(service: tinker.ServiceClient) -> str:
    """Request a token from the base model. Return the error, or that it was answered."""
    sampler: Any = service.create_sampling_client(base_model="tiny")
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    try:
        sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1)).result()
    except tinker.TinkerError as refused:
        return str(refused)
    return "answered"


def main(address: str, key: str, *only: str) -> None:
    """Print one line of JSON."""
    service = tinker.ServiceClient(base_url=address, api_key=key)
    numbers = [] if only else train(service)
    print(json.dumps({"numbers": numbers, "sampled": sample(service)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
