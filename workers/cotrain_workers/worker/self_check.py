"""Self-check of a live worker at the operator's request, between two steps.

It compares a pass of each adapter alone with the same passes in one mixed cycle. It also compares a sample of each
adapter, and of the base model, alone with the same samples together. The adapters are temporary and random. Their
ranks, trained parts and lengths differ. A leak from one adapter into the rows, the gradient, the step or the samples
of another makes the two results differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import structlog
import torch

from cotrain_store.oplog.execution import Execution
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.lora.self_check import LENGTHS, SPECS, TOLERANCE
from cotrain_workers.engine.ops import (
    Create,
    Datum,
    Failure,
    HostWeights,
    OptimStep,
    Pass,
    PassOutput,
)
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.group.engine import WorkerEngine

log = structlog.get_logger()

#: Maximum rank, so that the adapters of a large base model take little memory.
MAX_RANK = 8
#: Standard deviation of the random B. It moves log-probs by far more than rounding does.
SCALE_B = 0.02
#: A step with a large eps is a smooth function of the gradient, so rounding moves it little.
RATES = (1.0, 0.9, 0.95, 1.0, 0.0)  # learning rate, betas, eps, weight decay
#: Tokens of a sample, and the name of the base model in the result.
SAMPLED, BASE = 8, "the base model"


@dataclass(frozen=True)
class MixCheck:
    """Result of a self-check. Differences are relative to the largest value of their kind."""

    runs: int
    tokens: int  # of all passes and samples, alone and mixed
    tolerance: float
    logprobs: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0  # after an optimizer step
    samples: float | None = None
    """Log-probs of prompts and sampled tokens; None if the engine does not sample."""
    problem: str = ""
    """Sentence about the largest difference, or about a pass that failed; empty if the check passed."""


#: Outcome of a sample; None if the decoder stopped.
Sampled: TypeAlias = SampleOutput | Failure | None
#: Log-probs, gradients and weights of an adapter, each a 1-D tensor.
Numbers: TypeAlias = dict[str, torch.Tensor]
Probe: TypeAlias = Callable[[Sequence[SampleRequest], Mapping[str, HostWeights]], Yielding[dict[str, Sampled]]]
"""Runs sample requests together on the worker's decoder, as `SamplingService.probe`."""


def check_mix(engine: WorkerEngine, probe: Probe) -> Yielding[MixCheck]:
    """Compare each adapter's pass, step and sample alone and in a mix. It yields like the engine's cycles.

    On a CPU every bit must be equal. Otherwise, the tolerance is that of the LoRA self-check. The temporary adapters
    are dropped in any case.
    """
    vocab, numerics = engine.facts.vocab_size, engine.facts.numerics
    max_rank = min(engine.facts.max_rank, MAX_RANK)
    specs = [replace(each, rank=min(each.rank, max_rank), seed=at) for at, each in enumerate(SPECS)]
    ops = {f"self-check:{at}": _ops(f"self-check:{at}", at, vocab) for at in range(len(specs))}
    try:
        first = yield from _create(engine, dict(zip(ops, specs, strict=True)))
        alone: dict[str, Numbers | Failure] = {}
        for run in ops:
            engine.adapters.restore(run, first[run])
            alone |= yield from _run(engine, {run: ops[run]})
        for run in ops:
            engine.adapters.restore(run, first[run])
        mixed = yield from _run(engine, ops)
    finally:
        for run in ops:
            engine.adapters.drop(run)
    lent = {run: HostWeights(state.spec, state.weights) for run, state in first.items()}
    one_by_one, together = _probes("alone", lent, vocab), _probes("mixed", lent, vocab)
    sampled: dict[str, Sampled] = {}
    for group in (*([each] for each in one_by_one), together):
        sampled |= yield from probe(group, lent)
    found = _Differences(0.0 if numerics.device == "cpu" else TOLERANCE[getattr(torch, numerics.dtype)])
    tokens = 2 * sum(len(datum.tokens) for at in range(len(specs)) for datum in _datums(at, vocab))
    for run in ops:
        found.compare_numbers(run, alone[run], mixed[run])
    for one, other in zip(one_by_one, together, strict=True) if sampled else ():
        tokens += found.compare_samples(one.weights or BASE, sampled[one.id], sampled[other.id])
    return MixCheck(len(ops), tokens, found.tolerance, **found.largest, problem=found.problem)


def _probes(phase: str, lent: Mapping[str, HostWeights], vocab: int) -> list[SampleRequest]:
    """Return a greedy request for each adapter, and for the base model. Phases share no cached prompt."""
    return [
        SampleRequest(
            id=f"{run or BASE}:{phase}", weights=run,
            prompt=np.random.default_rng(at).integers(0, vocab, LENGTHS[at % len(LENGTHS)]),
            num_samples=1, max_tokens=SAMPLED, temperature=0.0, top_k=-1, top_p=1.0, seed=at,
            stop_tokens=frozenset(), stop_strings=(), prompt_logprobs=True, topk_prompt_logprobs=0,
            topk_sample_logprobs=0, prompt_logprobs_last_n=None, target_prompt_logprobs=None,
            tenant=f"self-check:{phase}",
        )
        for at, run in enumerate([*lent, None])
    ]  # fmt: skip


class _Differences:
    """Largest difference of each kind, and a sentence about the largest of all, or about a failure."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.largest: dict[str, float] = {}
        self.problem = ""

    def compare_numbers(self, run: str, before: Numbers | Failure, after: Numbers | Failure) -> None:
        """Add the results of a run's pass and step, alone and in a mix."""
        if isinstance(before, Failure) or isinstance(after, Failure):
            self._fail("pass", run, before, after)
            return
        for kind, values in before.items():
            self._add(kind, run, _difference(values, after[kind]))

    def compare_samples(self, run: str, before: Sampled, after: Sampled) -> int:
        """Add two samples of one adapter, and return the number of their tokens."""
        if not (isinstance(before, SampleOutput) and isinstance(after, SampleOutput)):
            self._fail("sample", run, before, after)
            return 0
        self._add("samples", run, _apart(before, after, self.tolerance))
        return len(_scores(before)) + len(_scores(after))

    def _add(self, kind: str, run: str, difference: float) -> None:
        if difference > max(self.tolerance, *self.largest.values(), 0.0):
            self.problem = (
                f"The {kind} of {run} in a mix differ from those alone by {difference:.1e} of the largest value; the "
                f"limit is {self.tolerance:.1e}."
            )
        self.largest[kind] = max(self.largest.get(kind, 0.0), difference)

    def _fail(self, what: str, run: str, *outcomes: object) -> None:
        failures = (each.message for each in outcomes if isinstance(each, Failure))
        self.problem = self.problem or f"The {what} of {run} failed: {next(failures, 'the decoder stopped')}"


def _scores(output: SampleOutput) -> np.ndarray:
    """Return the log-probs of the prompt's tokens, NaN for the first, and of the sampled ones."""
    assert output.prompt_logprobs is not None
    return np.concatenate([output.prompt_logprobs, output.sequences[0].logprobs])


def _apart(before: SampleOutput, after: SampleOutput, tolerance: float) -> float:
    """Return the largest difference of two samples of one prompt, up to their first other token.

    Rounding may exchange two tokens of nearly equal log-probs. Without a tolerance, another token is a difference of
    at least 1.
    """
    is_other = before.sequences[0].tokens != after.sequences[0].tokens
    assert before.prompt_logprobs is not None
    sampled = int(is_other.argmax()) + 1 if is_other.any() else len(is_other)
    compared = slice(1, len(before.prompt_logprobs) + sampled)
    found = _difference(*(torch.from_numpy(_scores(each)[compared]) for each in (before, after)))
    return max(found, 1.0) if is_other.any() and not tolerance else found


def _datums(at: int, vocab: int) -> list[Datum]:
    """Return the datums of an adapter: as long as the segments of the LoRA self-check, in two parts."""
    generator = np.random.default_rng(at)
    lengths = [max(1, LENGTHS[at] // 3), max(1, LENGTHS[at] - LENGTHS[at] // 3)]
    return [
        Datum(
            generator.integers(0, vocab, length),
            {"target_tokens": generator.integers(0, vocab, length), "weights": np.ones(length, np.float32)},
        )
        for length in lengths
    ]


def _ops(run: str, at: int, vocab: int) -> tuple[Pass, OptimStep]:
    datums = _datums(at, vocab)
    forward_backward = Pass(run, 1, datums, "cross_entropy", {}, needs_grad=True)
    return forward_backward, OptimStep(run, 2, *RATES, grad_clip_norm=0.0)


def _create(engine: WorkerEngine, specs: Mapping[str, AdapterSpec]) -> Yielding[dict[str, AdapterState]]:
    """Create the adapters with a random B, and return their states."""
    yield from engine.cycle([Create(run, 0, spec) for run, spec in specs.items()])
    states = {}
    for run, spec in specs.items():
        state = engine.adapters.state(run)
        generator = torch.Generator().manual_seed(spec.seed)
        for pair in engine.adapters.layout_of(spec).views(state.weights).values():
            pair.b.copy_(SCALE_B * torch.randn(pair.b.shape, generator=generator))
        states[run] = state
    return states


def _run(engine: WorkerEngine, ops: Mapping[str, tuple[Pass, OptimStep]]) -> Yielding[dict[str, Numbers | Failure]]:
    """Run the passes in one cycle, then the steps in another one."""
    bank = engine.adapters
    passed = (yield from engine.cycle([of_run[0] for of_run in ops.values()])).outputs
    gradients = {run: bank.state(run).grads.clone() for run in ops}
    stepped = (yield from engine.cycle([of_run[1] for of_run in ops.values()])).outputs
    found: dict[str, Numbers | Failure] = {}
    for run in ops:
        match passed[run, 1], stepped[run, 2]:
            case (Failure() as failure, _) | (_, Failure() as failure):
                found[run] = failure
            case PassOutput(arrays), _:
                logprobs = torch.from_numpy(np.concatenate([each.ravel() for each in arrays]))
                weights = bank.state(run).weights.clone()
                found[run] = {"logprobs": logprobs, "gradients": gradients[run], "weights": weights}
    return found


def _difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value; inf for a value that is not finite."""
    if not (before.isfinite().all() and after.isfinite().all()):
        return float("inf")
    largest = float(before.abs().max())
    return float((before - after).abs().max()) / (largest or 1.0)


class SelfCheck:
    """Requests for self-checks of this worker, and the result of the last one for its heartbeat."""

    def __init__(self, engine: WorkerEngine, execution: Execution, probe: Probe) -> None:
        self._engine = engine
        self._probe = probe
        self._execution = execution
        self.last: dict[str, Any] | None = None
        """Result of the last check in this process: `asked_at`, `at`, `took_s`, `ok` and the fields of MixCheck."""

    def run_if_requested(self, run: Callable[[Yielding[MixCheck]], MixCheck]) -> bool:
        """Run a requested check by `run`, and return True if there was one.

        The request is removed first, so that a check that crashes the process does not run again. Raises
        DeviceLost if it left the device unable to compute.
        """
        asked_at = self._execution.take_self_check()
        if asked_at is None:
            return False
        began = time.monotonic()
        try:
            found = run(check_mix(self._engine, self._probe))
        except Exception as error:  # the check must not stop the worker, only report
            log.exception("self_check_failed")
            self._engine.check_device()
            found = MixCheck(0, 0, 0.0, problem=f"The check failed: {error}")
        self.last = {
            "asked_at": asked_at, "at": time.time(), "took_s": round(time.monotonic() - began, 3),
            "ok": not found.problem, **asdict(found),
        }  # fmt: skip
        log.info("self_check", **self.last)
        return True
