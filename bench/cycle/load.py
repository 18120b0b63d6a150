"""The work that is measured: the same sequences, shared out among more or fewer tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, CycleOutput, Datum, Failure, Op, OptimStep, Pass
from cotrain_workers.engine.spec import AdapterSpec

RANK = 16


@dataclass(frozen=True)
class Load:
    """One cycle's sequences, all of one length; `tenants` of them share it equally."""

    sequences: int
    length: int
    tenants: tuple[int, ...]  # how many are measured

    @property
    def tokens(self) -> int:
        """Return the tokens of a cycle."""
        return self.sequences * self.length

    def rows(self, vocab: int) -> np.ndarray:
        """Return int64 `[sequences, length + 1]`: inputs, and targets shifted by one."""
        return np.random.default_rng(0).integers(0, vocab, (self.sequences, self.length + 1))

    def batches(self, tenants: int, vocab: int, device: str) -> list[torch.Tensor]:
        """Return each tenant's share of the rows."""
        rows = torch.from_numpy(self.rows(vocab)).to(device)
        return list(rows.chunk(tenants))


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
    return [
        Pass(f"run-{at}", 1, datums[at * share : (at + 1) * share], "cross_entropy", {}, True) for at in range(tenants)
    ]


def steps(tenants: int) -> list[Op]:
    """Return one optimizer step per tenant."""
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
