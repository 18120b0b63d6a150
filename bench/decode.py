"""Decode throughput of the base model alone, one adapter and 32 adapters, against `generate` per adapter.

    python -m bench decode --device cpu|cuda [--sizes 5m] [--batches 1,16,64]

Needs torch, transformers, peft, safetensors and numpy; no server. Every request has a prompt of its own and
generates a fixed number of tokens greedily. Times are medians over whole requests, prompts included, taken in
alternation. The way `generate` is the usual code without a server: transformers with a PEFT adapter and its KV cache, one
call per adapter for all rows of that adapter.

On CUDA it also measures decode steps alone, at batch 128 and 1k of context, as a share of the limit by memory
bandwidth. Per step, the weights of the base, those of the adapters in use and the keys and values of every sequence
are read once. The bandwidth is that of a large copy measured in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.support.model import SHAPES, build
from bench.support.record import DEVICE, Args, Choice, Options, Report, names, show
from bench.support.roofline import copy_bandwidth
from bench.support.timing import Work, alternate, timed, turns
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.decoding.slot_pool import slot_layout
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, HostWeights, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import graph_report, request
from tests.support.training import PeftOracle

RANK, ADAPTERS = 8, 32
PROMPT = {"cpu": 32, "cuda": 128}
NEW_TOKENS = {"cpu": 48, "cuda": 128}
CEILING_CONTEXT, CEILING_RANK = 1024, 16
CEILING_BLOCKS, BLOCK_STEPS = 5, 16  # per way, in alternation
CEILING_STEPS = 2 * CEILING_BLOCKS * (BLOCK_STEPS + 4)
TARGET_RATIO, TARGET_SPEEDUP = 1.3, 3.0

OPTIONS: Options = {
    **DEVICE,
    "sizes": (names, f"of {', '.join(SHAPES)}; by default 5m on a CPU, else 0.6b"),
    "batches": [1, 16, 64], "rounds": 5,
    "ceiling_size": (Choice(tuple(SHAPES)), "by default 8b on CUDA, none on a CPU"),
    "ceiling_batch": 128, "ceiling_adapters": 64,
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    is_cuda = args.device == "cuda"
    sizes = ["0.6b" if is_cuda else "5m"] if args.sizes is None else args.sizes
    if is_cuda:
        args.ceiling_size = args.ceiling_size or "8b"
    report["rank"] = RANK
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.models or Path(scratch)
        report["throughput"] = [row for size in sizes for row in throughput(folder, size, args)]
        if args.ceiling_size:
            report["ceiling"] = ceiling(folder, args)


@dataclass(frozen=True)
class Bench:
    """One model, its adapters, and the workloads to measure on it."""

    device: str
    engine: Engine
    decoder: EngineDecoder
    network: Any  # transformers, with PEFT adapters "default", "t1", ...
    rng: np.random.Generator

    def prompt(self) -> np.ndarray:
        return self.rng.integers(0, self.engine.facts.vocab_size, PROMPT[self.device])

    def decode(self, batch: int, adapters: int) -> Work:
        """Return our way: all requests in one batch, over `adapters` adapters (0: the base alone), sorted by adapter."""
        count = NEW_TOKENS[self.device]

        def work() -> None:
            for at in range(batch):
                adapter = f"t{at * min(adapters, batch) // batch}" if adapters else None
                self.decoder.add(request(str(at), self.prompt(), adapter, temperature=0.0, max_tokens=count))
            while self.decoder.busy:
                for _, result in self.decoder.step().finished:
                    assert isinstance(result, SampleOutput), result
                    assert len(result.sequences[0].tokens) == count

        return work

    def generate(self, batch: int, adapters: int) -> Work:
        """Return the way without a server: one adapter after the other."""
        groups, count = min(adapters, batch), NEW_TOKENS[self.device]

        def work() -> None:
            for at in range(groups):
                self.network.set_adapter("default" if at == 0 else f"t{at}")
                ids = np.stack([self.prompt() for _ in range(batch // groups)])
                tokens = torch.from_numpy(ids).to(self.device)
                self.network.generate(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                    max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                )  # fmt: skip

        return work


def throughput(folder: Path, size: str, args: Args) -> Iterator[dict[str, Any]]:
    """Yield tokens/s per batch size, and the cost and speedup of 32 adapters."""
    bench = load(folder, size, args.device)
    for batch in args.batches:
        ways = {
            "base": bench.decode(batch, 0), "one": bench.decode(batch, 1), "many": bench.decode(batch, ADAPTERS),
            "generate_one": bench.generate(batch, 1), "generate_many": bench.generate(batch, ADAPTERS),
        }  # fmt: skip
        timed_ways = {name: partial(timed, way, args.device) for name, way in ways.items()}
        took = alternate(timed_ways, args.rounds)
        median = {name: statistics.median(times) for name, times in took.items()}
        tokens = batch * NEW_TOKENS[args.device]
        row: dict[str, Any] = {"size": size, "batch": batch, "adapters": min(batch, ADAPTERS)}
        row |= {f"{name}_tokens_per_s": tokens / median[name] for name in ways}
        row |= {
            "many_over_one": median["many"] / median["one"], "many_over_base": median["many"] / median["base"],
            "times_generate_one": median["generate_one"] / median["one"],
            "times_generate_many": median["generate_many"] / median["many"],
        }  # fmt: skip
        yield show(row)
        if row["many_over_one"] > TARGET_RATIO:
            print(f"  above the target: {ADAPTERS} adapters at most {TARGET_RATIO} times one")
        if batch == 16 and row["times_generate_many"] < TARGET_SPEEDUP:
            print(f"  below the target: {TARGET_SPEEDUP} times `generate` at batch 16")


def load(folder: Path, size: str, device: str) -> Bench:
    """Return a random model with 32 adapters for us and for PEFT."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build(folder / size, size, dtype, device)
    engine = Engine.load(str(model), device=device)
    weights = adapters_of(engine, ADAPTERS, RANK)
    oracle = PeftOracle(model, AdapterSpec(RANK, seed=0), dtype, device)
    config = oracle.model.peft_config["default"]
    for at in range(1, ADAPTERS):
        oracle.model.add_adapter(f"t{at}", config, autocast_adapter_dtype=False)
    oracle.model.eval()
    decoder = engine.decoder(weights.__getitem__, kv_tokens=None, text=None)
    return Bench(device, engine, decoder, oracle.model, np.random.default_rng(0))


def adapters_of(engine: Engine, count: int, rank: int) -> dict[str, HostWeights]:
    """Return sampler weights without zero matrices."""
    weights = {}
    for at in range(count):
        name = f"t{at}"
        engine.run([Create(name, 0, AdapterSpec(rank, seed=at))])
        saved = engine.run([Save(name, 1)]).outputs[name, 1]
        assert isinstance(saved, SaveOutput)
        noise = torch.randn(saved.weights.flat.shape, generator=torch.Generator().manual_seed(at))
        weights[name] = HostWeights(saved.weights.spec, saved.weights.flat + 1e-3 * noise)
        engine.adapters.drop(name)
    return weights


def ceiling(folder: Path, args: Args) -> dict[str, Any]:
    """Measure decode steps alone, against the limit by memory bandwidth."""
    size, device = args.ceiling_size, args.device
    batch, adapters = args.ceiling_batch, args.ceiling_adapters
    model = build(folder / size, size, torch.bfloat16, device)
    engine = Engine.load(str(model), device=device)
    weights = adapters_of(engine, adapters, CEILING_RANK)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    slot_bytes = dtype.itemsize * slot_layout(engine.targets, CEILING_RANK).size
    tokens = batch * (CEILING_CONTEXT + CEILING_STEPS + 512)
    room = adapters * slot_bytes
    decoder = engine.decoder(weights.__getitem__, kv_tokens=tokens, text=None, weights_bytes=room)
    prompts = np.random.default_rng(0).integers(0, engine.facts.vocab_size, (batch, CEILING_CONTEXT))
    for at, prompt in enumerate(prompts):
        decoder.add(request(str(at), prompt, f"t{at * adapters // batch}", max_tokens=None))
    while decoder.step().decoded_tokens < batch:  # prompts
        pass

    def block() -> None:
        for _ in range(BLOCK_STEPS):
            assert decoder.step().decoded_tokens == batch

    took: dict[bool, list[float]] = {False: [], True: []}
    for overlaps in turns((False, True), CEILING_BLOCKS):
        decoder.overlaps = overlaps
        for _ in range(4):
            decoder.step()
        # Several steps are timed together, because waiting after each step would prevent the overlap.
        took[overlaps].append(timed(block, device) / BLOCK_STEPS)
    shape = SHAPES[size]
    linear = sum(inputs * outputs for inputs, outputs in shape.linears)
    base_bytes = 2 * (shape.layers * linear + shape.hidden * shape.vocab)
    adapter_bytes = 2 * sum(w.flat.numel() for w in weights.values())
    context = CEILING_CONTEXT + CEILING_STEPS // 2
    kv_bytes = batch * context * 2 * shape.layers * shape.kv_heads * shape.head * 2
    bandwidth = copy_bandwidth(device)
    possible = (base_bytes + adapter_bytes + kv_bytes) / bandwidth
    median = statistics.median(took[True])
    return show(
        {
            "size": size, "batch": batch, "context": CEILING_CONTEXT, "adapters": adapters, "rank": CEILING_RANK,
            "tokens_per_s": batch / median, "step_ms": median * 1e3,
            "step_ms_one_after_the_other": statistics.median(took[False]) * 1e3, "possible_ms": possible * 1e3,
            "of_ceiling": possible / median, "bandwidth_tb_s": bandwidth / 1e12, "graphs": graph_report(decoder),
        }
    )  # fmt: skip
