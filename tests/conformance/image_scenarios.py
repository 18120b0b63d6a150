"""Scenario with images, run under the official SDK; see `scenarios.py`."""

from __future__ import annotations

from typing import Any

import torch
from tinker import types

from tests.conformance.scenarios import Bench, Facts, batch, error_of, logprobs, run_named, step
from tests.support.pictures import picture

ROWS, COLUMNS, SIDE = 2, 3, 8


def image(kind: str = "png", seed: int = 0, **changes: Any) -> types.ImageChunk:
    """Make an image of 6 tokens."""
    data = picture(seed, COLUMNS * SIDE, ROWS * SIDE, kind.upper())
    given = {"data": data, "format": kind, "expected_tokens": ROWS * COLUMNS, **changes}
    return types.ImageChunk(**given)


def pictured(*chunks: types.ImageChunk) -> types.Datum:
    """Make a datum of text around images."""
    text = types.EncodedTextChunk(tokens=[5, 6, 7])
    between = [part for chunk in chunks for part in (chunk, text)]
    model_input = types.ModelInput(chunks=[text, *between])
    length = 3 + 9 * len(chunks)
    targets = torch.arange(length) % 100
    inputs = {"target_tokens": targets, "weights": (torch.arange(length) % 2).float()}
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def trained(bench: Bench) -> Facts:
    """Train and sample with images, beside a tenant with text; then send images that are refused."""
    run, text = bench.run(rank=4, seed=7), bench.of_key(1).run(rank=2, seed=3)
    data = [pictured(image(), image("jpeg", 1)), pictured(image())]
    sent = []
    for _ in range(2):
        for its_run, its_data in ((run, data), (text, batch())):
            sent.append(its_run.forward_backward(its_data, "cross_entropy"))
            sent.append(its_run.optim_step(types.AdamParams(learning_rate=1e-2)))
    for each in sent:
        each.result()
    sampler = run.save_weights_and_get_sampling_client("pictured")
    prompt = data[0].model_input
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    sample = sampler.sample(prompt, 1, greedy).result().sequences[0]
    cut = image(data=image().data[:-40])
    return {
        "logprobs": logprobs(run.forward(data, "cross_entropy").result()),
        "text": logprobs(text.forward(batch(), "cross_entropy").result()),
        "tokens": list(sample.tokens),
        "sampled": list(sample.logprobs),
        "prompt": sampler.compute_logprobs(prompt).result(),
        "cut": error_of(lambda: run.forward_backward([pictured(cut)], "cross_entropy").result()),
        "counted": error_of(
            lambda: sampler.sample(types.ModelInput(chunks=[image(expected_tokens=7)]), 1, greedy).result()
        ),
    }


def text_alone(bench: Bench) -> Facts:
    """Train the tenant with text without a neighbour."""
    text = bench.of_key(1).run(rank=2, seed=3)
    for _ in range(2):
        step(text, batch())
    return {"text": logprobs(text.forward(batch(), "cross_entropy").result())}


if __name__ == "__main__":
    run_named(globals())
