"""Self-check of an engine in use: a pass of each adapter alone, and the same passes in one mixed cycle.

The adapters are temporary and random, of several ranks and trained parts, and the lengths differ. A leak
from one adapter into the rows, the gradient or the step of another makes the two results differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.lora.self_check import LENGTHS, SPECS, TOLERANCE
from cotrain_workers.engine.ops import (
    Create,
    CycleOutput,
    Datum,
    Failure,
    Op,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    StepOutput,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout

#: Maximum rank, so that the adapters of a large base model take little memory.
MAX_RANK = 8
#: Standard deviation of the random B. It moves log-probs by far more than rounding does.
SCALE_B = 0.02
#: A step with a large eps is a smooth function of the gradient, so rounding moves it little.
RATES = (1.0, 0.9, 0.95, 1.0, 0.0)  # learning rate, betas, eps, weight decay


class Bank(Protocol):
    """The adapters in memory; see `AdapterBank`."""

    def drop(self, run: str) -> None:
        """Remove a run's adapter."""

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host."""

    def restore(self, run: str, state: AdapterState) -> object:
        """Replace any adapter of this run by a state."""

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return the positions of the matrices of such an adapter."""


RunCycle = Callable[[Sequence[Op]], Yielding[CycleOutput]]


@dataclass(frozen=True)
class MixCheck:
    """Result of a self-check. Differences are relative to the largest value of their kind."""

    runs: int
    tokens: int  # of all passes, alone and mixed
    tolerance: float
    logprobs: float
    gradients: float
    weights: float  # after an optimizer step
    problem: str = ""
    """Sentence about the largest difference, or about a pass that failed; empty if the check passed."""


def check_mix(
    cycle: RunCycle, bank: Bank, dtype: str, *, exact: bool, vocab: int, max_rank: int
) -> Yielding[MixCheck]:
    """Compare each adapter's pass and step alone and in a mix. It yields like the engine's cycles.

    With `exact`, as on a CPU, every bit must be equal. Otherwise, the tolerance is that of the LoRA
    self-check for `dtype`. The temporary adapters are dropped in any case.
    """
    specs = [
        replace(each, rank=min(each.rank, max_rank, MAX_RANK), seed=at)
        for at, each in enumerate(SPECS)
    ]
    ops = {f"self-check:{at}": _ops(f"self-check:{at}", at, vocab) for at in range(len(specs))}
    with _dropped(bank, ops):
        first = yield from _create(cycle, bank, dict(zip(ops, specs, strict=True)))
        alone: dict[str, _Result] = {}
        for run in ops:
            bank.restore(run, first[run])
            alone |= yield from _run(cycle, bank, {run: ops[run]})
        for run in ops:
            bank.restore(run, first[run])
        mixed = yield from _run(cycle, bank, ops)
    tokens = 2 * sum(len(datum.tokens) for at in range(len(specs)) for datum in _datums(at, vocab))
    return _compare(alone, mixed, tokens, 0.0 if exact else TOLERANCE[getattr(torch, dtype)])


@dataclass(frozen=True)
class _Result:
    """Numbers of one adapter, each a 1-D tensor; empty with the message of a failure."""

    logprobs: torch.Tensor
    gradients: torch.Tensor
    weights: torch.Tensor
    failure: str = ""


@contextmanager
def _dropped(bank: Bank, runs: Mapping[str, object]) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            bank.drop(run)


def _datums(at: int, vocab: int) -> list[Datum]:
    """Return the datums of an adapter: as long as the segments of the LoRA self-check, in two parts."""
    generator = np.random.default_rng(at)
    lengths = [max(1, LENGTHS[at] // 3), max(1, LENGTHS[at] - LENGTHS[at] // 3)]
    return [
        Datum(
            generator.integers(0, vocab, length),
            {
                "target_tokens": generator.integers(0, vocab, length),
                "weights": np.ones(length, np.float32),
            },
        )
        for length in lengths
    ]


def _ops(run: str, at: int, vocab: int) -> tuple[Pass, OptimStep]:
    datums = _datums(at, vocab)
    forward_backward = Pass(run, 1, datums, "cross_entropy", {}, needs_grad=True)
    return forward_backward, OptimStep(run, 2, *RATES, grad_clip_norm=0.0)


def _create(
    cycle: RunCycle, bank: Bank, specs: Mapping[str, AdapterSpec]
) -> Yielding[dict[str, AdapterState]]:
    """Create the adapters with a random B, and return their states."""
    yield from cycle([Create(run, 0, spec) for run, spec in specs.items()])
    states = {}
    for run, spec in specs.items():
        state = bank.state(run)
        generator = torch.Generator().manual_seed(spec.seed)
        for pair in bank.layout_of(spec).views(state.weights).values():
            pair.b.copy_(SCALE_B * torch.randn(pair.b.shape, generator=generator))
        states[run] = state
    return states


def _run(
    cycle: RunCycle, bank: Bank, ops: Mapping[str, tuple[Pass, OptimStep]]
) -> Yielding[dict[str, _Result]]:
    """Run the passes in one cycle, then the steps in another one."""
    passed = (yield from cycle([of_run[0] for of_run in ops.values()])).outputs
    gradients = {run: bank.state(run).grads.clone() for run in ops}
    stepped = (yield from cycle([of_run[1] for of_run in ops.values()])).outputs
    return {
        run: _result(passed[run, 1], stepped[run, 2], gradients[run], bank.state(run).weights)
        for run in ops
    }


def _result(
    passed: Output, stepped: Output, gradients: torch.Tensor, weights: torch.Tensor
) -> _Result:
    if not (isinstance(passed, PassOutput) and isinstance(stepped, StepOutput)):
        failure = passed if isinstance(passed, Failure) else stepped
        message = failure.message if isinstance(failure, Failure) else str(failure)
        return _Result(torch.zeros(0), torch.zeros(0), torch.zeros(0), message)
    logprobs = torch.from_numpy(np.concatenate([each.ravel() for each in passed.logprobs]))
    return _Result(logprobs, gradients, weights.clone())


def _compare(
    alone: Mapping[str, _Result], mixed: Mapping[str, _Result], tokens: int, tolerance: float
) -> MixCheck:
    worst = {"logprobs": 0.0, "gradients": 0.0, "weights": 0.0}
    problem, largest = "", tolerance
    for run, before in alone.items():
        after = mixed[run]
        if message := before.failure or after.failure:
            problem = problem or f"The pass of {run} failed: {message}"
            continue
        for name in worst:
            difference = _difference(getattr(before, name), getattr(after, name))
            worst[name] = max(worst[name], difference)
            if difference > largest:
                largest = difference
                problem = (
                    f"The {name} of {run} in a mix differ from those alone by {difference:.1e} of the largest "
                    f"value; the limit is {tolerance:.1e}."
                )
    return MixCheck(runs=len(alone), tokens=tokens, tolerance=tolerance, problem=problem, **worst)


def _difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value; inf for a value that is not finite."""
    if not (before.isfinite().all() and after.isfinite().all()):
        return float("inf")
    largest = float(before.abs().max())
    return float((before - after).abs().max()) / (largest or 1.0)
