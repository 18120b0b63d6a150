"""Reverse-KL examples for tests of the engine, with a dense oracle: plain PEFT in fp64, all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, HostWeights, KlDatum, Output, ReverseKl, ReverseKlOutput
from cotrain_workers.engine.spec import AdapterSpec, Layout
from tests.support.training import PeftOracle, relative_error

SPEC = AdapterSpec(4, seed=11)


@dataclass(frozen=True)
class KlParity:
    """Errors of one reverse KL relative to the oracle."""

    loss_error: float  # of a target's loss, relative to the loss if that is above 1
    sum_error: float  # relative
    gradient_error: float  # relative to the largest gradient


def kl_datum(rng: np.random.Generator, student: int, reference: int, targets: int, *, vocab: int = 128) -> KlDatum:
    """Return a datum with contexts of `student` and `reference` tokens. About a third of its weights are 0."""
    continuation = rng.integers(0, vocab, targets)[:-1]
    weights = rng.normal(size=targets) * (rng.random(targets) > 0.3)
    weights[-1] = 1.0
    return KlDatum(
        np.concatenate([rng.integers(0, vocab, student), continuation]),
        np.concatenate([rng.integers(0, vocab, reference), continuation]),
        weights.astype(np.float32),
    )


def kl_datums(seed: int) -> list[KlDatum]:
    """Return examples of various lengths."""
    rng = np.random.default_rng(seed)
    shapes = ((5, 5, 7), (1, 30, 12), (20, 2, 1), (3, 9, 33))
    return [kl_datum(rng, *shape) for shape in shapes]


def random_weights(spec: AdapterSpec, layout_of: Callable[[AdapterSpec], Layout]) -> HostWeights:
    """Return weights in which neither A nor B is zero."""
    layout = layout_of(spec)
    weights = HostWeights(spec, torch.zeros(layout.size))
    generator = torch.Generator().manual_seed(spec.seed)
    for pair in layout.views(weights.flat).values():
        pair.a.copy_(torch.randn(pair.a.shape, generator=generator) / 8)
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) / 16)
    return weights


def started(engine: Engine, run: str = "a", spec: AdapterSpec = SPEC) -> Engine:
    """Add a run to an engine, with a B that is not zero. Return the engine."""
    engine.run([Create(run, 0, spec)])
    weights = random_weights(spec, engine.adapters.layout_of).flat
    engine.adapters.restore(run, replace(engine.adapters.state(run), weights=weights))
    return engine


def kl_parity(engine: Engine, folder: Path, op: ReverseKl) -> KlParity:
    """Run one reverse KL of a run without a gradient, and the same in fp64. Return the errors."""
    layout, state = engine.adapters[op.run].layout, engine.adapters.state(op.run)
    student = PeftOracle(folder, state.spec, torch.float64)
    student.load(layout, state.weights)
    output = found(engine.run([op]).outputs[op.run, op.seq])
    losses = dense_losses(student, reference_oracle(folder, op.reference, engine.adapters.layout_of), op)
    total = torch.cat(losses).sum()
    total.backward()
    ours = torch.from_numpy(np.concatenate(output.losses)).double()
    theirs = torch.cat(losses).detach()
    return KlParity(
        loss_error=float(((ours - theirs).abs() / theirs.abs().clamp(min=1)).max()),
        sum_error=abs(output.loss_sum / total.item() - 1),
        gradient_error=relative_error(engine.adapters.state(op.run).grads, student.arena(layout, grads=True)),
    )


def found(output: Output) -> ReverseKlOutput:
    """Return the output of a reverse KL, which must have succeeded."""
    assert isinstance(output, ReverseKlOutput), output
    return output


def dense_losses(student: PeftOracle, reference: PeftOracle, op: ReverseKl) -> list[torch.Tensor]:
    """Return each datum's weighted divergences `[n]`, differentiable by the student's weights."""
    losses = []
    for datum in op.datums:
        last = len(datum.weights)
        ours = log_softmax(student, datum.tokens, last, op.temperature)
        with torch.no_grad():
            theirs = log_softmax(reference, datum.reference, last, op.temperature)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        losses.append(torch.from_numpy(datum.weights).double() * divergence)
    return losses


def reference_oracle(
    folder: Path, reference: HostWeights | None, layout_of: Callable[[AdapterSpec], Layout]
) -> PeftOracle:
    """Return plain PEFT with the reference's weights. A fresh adapter changes no result."""
    if reference is None:
        return PeftOracle(folder, AdapterSpec(1, 0), torch.float64)
    oracle = PeftOracle(folder, reference.spec, torch.float64)
    oracle.load(layout_of(reference.spec), reference.flat)
    return oracle


def log_softmax(oracle: PeftOracle, tokens: np.ndarray, last: int, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of the whole vocabulary at the last positions, `[last, V]`."""
    logits: torch.Tensor = oracle.model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    return torch.log_softmax(logits[-last:] / temperature, -1)
