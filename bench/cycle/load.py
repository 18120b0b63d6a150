"""The work that is measured: the same sequences, shared by more or fewer tenants; and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.support.model import SHAPES
from bench.support.roofline import adapter_bytes
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, CycleOutput, Datum, Failure, Op, OptimStep, Pass
from cotrain_workers.engine.spec import AdapterSpec

RANK = 16


@dataclass(frozen=True)
class Load:
    """One cycle's sequences, all of one length; `tenants` of them share it equally."""

    sequences: int
    length: int
    tenants: tuple[int, ...]  # numbers that are measured

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def rows(self, vocab: int) -> np.ndarray:
        """Return int64 `[sequences, length + 1]`: inputs, and targets shifted by one."""
        return np.random.default_rng(0).integers(0, vocab, (self.sequences, self.length + 1))

    def batches(self, tenants: int, vocab: int, device: str) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.rows(vocab)).to(device).chunk(tenants))


def create_runs(engine: Engine, tenants: int) -> None:
    """Start runs with an adapter on every module."""
    for at in range(tenants):
        if f"run-{at}" not in engine.adapters:
            engine.run([Create(f"run-{at}", 0, AdapterSpec(RANK, seed=at))])


def passes(load: Load, tenants: int, vocab: int) -> list[Op]:
    """Return one forward_backward per tenant over its share."""
    share, odd = divmod(load.sequences, tenants)
    assert not odd, f"{load.sequences} sequences cannot be shared by {tenants}"
    weights = np.ones(load.length, np.float32)
    datums = [Datum(row[:-1], {"target_tokens": row[1:], "weights": weights}) for row in load.rows(vocab)]
    shares = [datums[at * share : (at + 1) * share] for at in range(tenants)]
    return [Pass(f"run-{at}", 1, datums, "cross_entropy", {}, True) for at, datums in enumerate(shares)]


def steps(tenants: int) -> list[Op]:
    return [OptimStep(f"run-{at}", 2, 1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0) for at in range(tenants)]


def cycle(engine: Engine, load: Load, tenants: int) -> Callable[[], CycleOutput]:
    """Return one cycle of the engine: a forward_backward and a step of every tenant."""
    ops = [*passes(load, tenants, engine.facts.vocab_size), *steps(tenants)]
    return lambda: run(engine, ops)


def run(engine: Engine, ops: Sequence[Op]) -> CycleOutput:
    """Run a cycle. Raises RuntimeError if an op failed: then it was not measured."""
    done = engine.run(ops)
    failures = [out.message for out in done.outputs.values() if isinstance(out, Failure)]
    if failures:
        raise RuntimeError(f"{len(failures)} ops failed: {failures[0]}")
    return done


def measure_memory(engine: Engine, size: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the bytes per adapter on a GPU, next to the formula, and the peak bytes per token.

    `bench cost` counts what autograd keeps, without a GPU.
    """
    create_runs(engine, 1)
    few, many = Load(2, 512, (1,)), Load(4, 512, (1,))  # both fit into one forward
    peaks = [_peak_bytes(engine, load) for load in (few, many)]
    return {
        "per_adapter": _bytes_per_new_adapter(engine),
        "ideal_per_adapter": adapter_bytes(SHAPES[size], RANK, dtype),
        "peak_per_token": (peaks[1] - peaks[0]) / (many.tokens - few.tokens),
    }


def _peak_bytes(engine: Engine, load: Load) -> int:
    ops = passes(load, 1, engine.facts.vocab_size)
    run(engine, ops)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run(engine, ops)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    run(engine, steps(1))
    return peak


def _bytes_per_new_adapter(engine: Engine) -> float:
    """Return the device bytes per adapter, for four new adapters that have trained."""
    for at in range(4):
        engine.adapters.drop(f"run-{at}")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    create_runs(engine, 4)
    run(engine, passes(Load(4, 64, (4,)), 4, engine.facts.vocab_size))
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    run(engine, steps(4))
    return (after - before) / 4
