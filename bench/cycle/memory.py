"""Measured memory of an adapter and of a token on a GPU. `bench cost` counts what autograd keeps, without one."""

from __future__ import annotations

from typing import Any

import torch

from bench.cycle.load import RANK, Load, create_runs, passes, run, steps
from bench.support.model import SHAPES
from bench.support.roofline import adapter_bytes
from bench.support.timing import synchronize
from cotrain_workers.engine.engine import Engine


def measure_memory(engine: Engine, size: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the bytes per adapter, next to the formula, and the peak bytes per token."""
    create_runs(engine, 1)
    few, many = Load(2, 512, (1,)), Load(4, 512, (1,))  # both fit into one forward
    peaks = [peak_bytes(engine, load) for load in (few, many)]
    return {
        "per_adapter": bytes_per_new_adapter(engine),
        "ideal_per_adapter": adapter_bytes(SHAPES[size], RANK, dtype),
        "peak_per_token": (peaks[1] - peaks[0]) / (many.tokens - few.tokens),
    }


def peak_bytes(engine: Engine, load: Load) -> int:
    """Return the peak of allocated device memory during one pass."""
    ops = passes(load, 1, engine.facts.vocab_size)
    run(engine, ops)
    synchronize("cuda")
    torch.cuda.reset_peak_memory_stats()
    run(engine, ops)
    synchronize("cuda")
    peak = torch.cuda.max_memory_allocated()
    run(engine, steps(1))
    return peak


def bytes_per_new_adapter(engine: Engine) -> float:
    """Return the device bytes per adapter, for four new adapters that have trained."""
    for name in (f"run-{at}" for at in range(4)):
        engine.adapters.drop(name)
    synchronize("cuda")
    before = torch.cuda.memory_allocated()
    create_runs(engine, 4)
    run(engine, passes(Load(4, 64, (4,)), 4, engine.facts.vocab_size))
    synchronize("cuda")
    after = torch.cuda.memory_allocated()
    run(engine, steps(4))
    return (after - before) / 4
