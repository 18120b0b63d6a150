"""Gap between the log-probs of the sampler and of the trainer, for the same tokens and weights.

    python -m bench trainer_sampler --device cpu|cuda [--size 8b] [--ranks 8,12,16]

It needs torch, transformers, safetensors and numpy. One adapter of each rank takes a step, so that no B is zero. All
of them then sample in one batch, and `forward` computes the log-probs of the same tokens. In fp32 the two agree to
rounding. In 16 bits they round in other places, and a policy loss sees the gap as a ratio of probabilities.

The model is random, so its log-probs are flat. A trained model has larger logits, and rounds them more coarsely.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.support.model import SHAPES, build
from bench.support.record import DEVICE, Args, Choice, Options, Report, show
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Failure, HostWeights, OptimStep, Pass, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import finish, graph_report, request, trainer_logprobs

#: Rate of the optimizer step, large enough that LoRA changes the log-probs by far more than rounding does.
LEARNING_RATE = 1e-3

OPTIONS: Options = {
    **DEVICE,
    "size": (Choice(tuple(SHAPES)), "by default tiny on a CPU, else 8b"), "ranks": [8, 12, 16],
    "sequences": (16, "of each rank"), "prompt": 256, "tokens": (128, "sampled per sequence"),
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    size = args.size or ("tiny" if args.device == "cpu" else "8b")
    with tempfile.TemporaryDirectory() as folder:
        model = build((args.models or Path(folder)) / size, size, torch.bfloat16, args.device)
        # A fixed size, because measuring it takes longer than the passes.
        settings: dict[str, Any] = {"micro_batch_tokens": 2048, "recompute": "never"}
        engine = Engine.load(str(model), device=args.device, dtype=torch.bfloat16, **settings)
    report["size"] = size
    report["ranks"] = [show({"size": size, **row}) for row in gaps(engine, args)]


def gaps(engine: Engine, args: Args) -> Iterator[dict[str, Any]]:
    """Yield the gap of each rank, of prompts and of sampled tokens."""
    rng = np.random.default_rng(0)
    weights = {f"rank-{rank}": trained(engine, f"rank-{rank}", rank, rng) for rank in args.ranks}
    asked = [
        request(
            f"{run} {at}", rng.integers(0, engine.facts.vocab_size, args.prompt), run,
            max_tokens=args.tokens, seed=at, prompt_logprobs=True,
        )
        for run in weights
        for at in range(args.sequences)
    ]  # fmt: skip
    decoder = engine.decoder(weights.__getitem__, kv_tokens=len(asked) * (args.prompt + args.tokens + 512), text=None)
    found = finish(decoder, asked)
    for run in weights:
        own = [each for each in asked if each.weights == run]
        outputs = [found[each.id] for each in own]
        samples = [out.sequences[0] for out in outputs if not isinstance(out, Failure)]
        assert len(samples) == len(own), outputs
        prompts = [out.prompt_logprobs for out in outputs if not isinstance(out, Failure)]
        both = [np.concatenate([each.prompt, sample.tokens]) for each, sample in zip(own, samples, strict=True)]
        theirs = trainer_logprobs(engine, run, *both)
        yield {
            "run": run, "graphs": graph_report(decoder),
            **figures("prompt", [ours[1:] for ours in prompts if ours is not None], [t[: args.prompt - 1] for t in theirs]),
            **figures("sampled", [each.logprobs for each in samples], [t[args.prompt - 1 :] for t in theirs]),
        }  # fmt: skip


def trained(engine: Engine, run: str, rank: int, rng: np.random.Generator) -> HostWeights:
    """Create an adapter, take one step, and return its weights."""
    ids = rng.integers(0, engine.facts.vocab_size, 512)
    datum = Datum(ids, {"target_tokens": np.roll(ids, -1), "weights": np.ones(len(ids), np.float32)})
    engine.run([Create(run, 0, AdapterSpec(rank, seed=rank)), Pass(run, 1, [datum], "cross_entropy", {}, True)])
    engine.run([OptimStep(run, 2, LEARNING_RATE, 0.9, 0.95, 1e-8, 0.0, 1.0)])
    saved = engine.run([Save(run, 3)]).outputs[run, 3]
    assert isinstance(saved, SaveOutput), saved
    return saved.weights


def figures(name: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> dict[str, float]:
    """Return mean, 99th percentile and maximum of the differences."""
    gap = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    return {
        f"{name}_mean": float(gap.mean()), f"{name}_p99": float(np.quantile(gap, 0.99)), f"{name}_max": float(gap.max())
    }  # fmt: skip
