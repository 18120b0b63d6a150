"""Sweep: runs with different settings that train on the same batches.

A batch is sent once and stored once for all runs, and they train on it in one clock cycle. Each run has the
numbers of a run alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import override

from cotrain.clients.run_results import TrainOutput
from cotrain.errors import CotrainError, UnsupportedInput
from cotrain.requests.connection import Connection
from cotrain.requests.futures import Future, both_ways, submitted
from cotrain.requests.run_requests import RunRequests
from cotrain.requests.sweep_requests import RunStep, send_sweep_pass
from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.datums import Datum, ForwardBackwardOutput
from cotrain.wire.runs import AdamParams, LoraConfig

ALIASES = {"lr": "learning_rate"}

STEPS_IN_FLIGHT = 2
"""Batches in flight during `halve`, so that the server never waits for this client."""

_ALL_ENDED = "all trials of this sweep are ended: create another sweep"


class HasLoss(Protocol):
    """Result with a loss."""

    @property
    def loss(self) -> float:
        """The loss of the batch."""


class RunClient(Protocol):
    """Client of one run of a sweep, as TrainingClient."""

    @property
    def requests(self) -> RunRequests:
        """Sender of the run's requests."""

    @property
    def unload_async(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """End the run."""


Result = TypeVar("Result", bound=HasLoss)
RunT = TypeVar("RunT", bound=RunClient)


@dataclass
class Trial(Generic[RunT]):
    """One run of a sweep, with its settings and its losses so far."""

    number: int
    """Position in the list of settings, from 0."""
    settings: dict[str, Any]
    """Settings as passed to `create_sweep`, `lr` under this name."""
    run: RunT
    adam: AdamParams
    losses: list[float] = field(default_factory=list)
    """Training loss before each optimizer step, as in `ForwardBackwardOutput.loss`; NaN if missing."""
    evaluations: list[float] = field(default_factory=list)
    """Losses of `evaluate`, in order."""
    is_ended: bool = False
    failure: str = ""
    """Error of the last failed request."""

    @property
    def score(self) -> float:
        """The last evaluation, or without one the last training loss; infinity without a finite loss."""
        last = (self.evaluations or self.losses or [math.inf])[-1]
        return last if math.isfinite(last) else math.inf

    @override
    def __repr__(self) -> str:
        state = ", ended" if self.is_ended else ""
        return f"<Trial {self.number} {self.settings}, score {self.score:.4g}{state}>"


@dataclass(frozen=True)
class SweepOutput(Generic[Result]):
    """Results of one batch, by the number of the trial."""

    outputs: dict[int, Result]
    failures: dict[int, CotrainError]
    """Errors of the trials without a result. The other trials are not affected."""

    @override
    def __repr__(self) -> str:
        losses = self.losses
        best = min(losses, key=losses.__getitem__, default=None)
        lowest = "" if best is None else f", lowest loss {losses[best]:.4g} of trial {best}"
        return f"<SweepOutput of {len(self.outputs)} trials{lowest}, {len(self.failures)} failed>"

    def __getitem__(self, number: int) -> Result:
        """Return the result of a trial. Raises its error if it failed."""
        if number in self.failures:
            raise self.failures[number]
        return self.outputs[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.outputs)

    @property
    def losses(self) -> dict[int, float]:
        """Losses of the trials with a result."""
        return {number: output.loss for number, output in self.outputs.items()}


class Sweep(Generic[RunT]):
    """Runs of one base model that train on the same batches. Create it with `ServiceClient.create_sweep`."""

    def __init__(self, connection: Connection, name: str, trials: Sequence[Trial[RunT]]) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._pending: set[Future[Any]] = set()
        self.name = name
        """Value of the tag `sweep:NAME` of its runs."""
        self.trials = list(trials)

    @property
    def live(self) -> list[Trial[RunT]]:
        """Trials whose run has not ended."""
        return [trial for trial in self.trials if not trial.is_ended]

    @override
    def __repr__(self) -> str:
        return f"<Sweep {self.name}: {len(self.live)} of {len(self.trials)} trials are live>"

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[SweepOutput[ForwardBackwardOutput]]:
        """Add the gradient of a batch to that of each live run; see `TrainingClient.forward_backward`."""
        return self._send(data, loss_fn, loss_fn_config, _passed)

    forward_backward_async = submitted(forward_backward)

    def train(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        lr_factor: float = 1.0,
    ) -> Future[SweepOutput[TrainOutput]]:
        """Train every live run one step on a batch, each with its own optimizer settings.

        `lr_factor` multiplies the learning rate of each trial: pass a schedule of `cotrain.learning_rates`.
        A trial that fails has its error in the result. If all fail, the future raises the first error.
        """
        return self._send(
            data, loss_fn, loss_fn_config, _trained, lr_factor=lr_factor, losses_of=lambda trial: trial.losses
        )

    train_async = submitted(train)

    def evaluate(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[SweepOutput[ForwardBackwardOutput]]:
        """Compute the loss of each live run without a gradient. It becomes the score of the trial."""
        return self._send(
            data, loss_fn, loss_fn_config, _passed, forward_only=True, losses_of=lambda trial: trial.evaluations
        )

    evaluate_async = submitted(evaluate)

    async def _best(self) -> Trial[RunT]:
        """Return the live trial with the lowest score, once all results have arrived."""
        return (await self._ranked())[0]

    best, best_async = both_ways(_best)

    async def _prune(self, keep: float = 0.5) -> list[Trial[RunT]]:
        """End the runs with the highest scores, once all results have arrived; return their trials.

        `keep` is the number of trials to keep, or below 1 their share, rounded up. The best trial is always
        kept. An ended run cannot be continued: save it before if you need it.
        """
        if not keep > 0 or (keep >= 1 and not isinstance(keep, int)):
            raise UnsupportedInput(f"keep must be a number of trials, or a share above 0 and below 1, not {keep}")
        ranked = await self._ranked()
        most = math.ceil(len(ranked) * keep) if keep < 1 else int(keep)
        return await self._end(ranked[max(1, most) :])

    prune, prune_async = both_ways(_prune)

    async def _close(self) -> None:
        """End all runs of the sweep."""
        await self._wait_for_results()
        await self._end(self.live)

    close, close_async = both_ways(_close)

    def halve(
        self,
        batches: Sequence[Sequence[Datum]],
        *,
        steps: int,
        evaluation: Sequence[Datum] | None = None,
        keep: float = 0.5,
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
        lr_factor: Callable[[int, int], float] = lambda _step, _steps: 1.0,
        progress: Callable[[Sweep[RunT]], None] = lambda _: None,
    ) -> Trial[RunT]:
        """Train by successive halving, and return the best trial, which trained on all batches.

        After `steps` batches the share `keep` of the trials stays; with `keep` 0.5 again after twice as many,
        and so on. Trials are compared by their loss on `evaluation`, or without it by their last training
        loss. `lr_factor(step, steps)` is as in `train`. The caller's thread calls `progress` after each batch.
        """
        if steps < 1 or not 0 < keep < 1:
            raise UnsupportedInput(f"steps must be at least 1, and keep above 0 and below 1, not {steps} and {keep:g}")
        in_flight: deque[Future[SweepOutput[TrainOutput]]] = deque()
        cut_at = float(steps)
        for number, batch in enumerate(batches):
            factor = lr_factor(number, len(batches))
            in_flight.append(self.train(batch, loss_fn, loss_fn_config, lr_factor=factor))
            is_cut = cut_at <= number + 1 < len(batches) and len(self.live) > 1
            while len(in_flight) >= (1 if is_cut else STEPS_IN_FLIGHT):
                in_flight.popleft().result()
                progress(self)
            if is_cut:
                cut_at /= keep
                if evaluation is not None:
                    self.evaluate(evaluation, loss_fn, loss_fn_config).result()
                self.prune(keep)
                progress(self)
        for each in in_flight:
            each.result()
        if evaluation is not None:
            self.evaluate(evaluation, loss_fn, loss_fn_config).result()
        progress(self)
        return self.best()

    def _send(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        result_of: Callable[[RunStep], Coroutine[Any, Any, Result]],
        *,
        forward_only: bool = False,
        lr_factor: float | None = None,
        losses_of: Callable[[Trial[RunT]], list[float]] | None = None,
    ) -> Future[SweepOutput[Result]]:
        """Send a pass of all live runs and, with `lr_factor`, their optimizer steps.

        Losses are added to the lists of `losses_of` when they arrive.
        """
        trials = self.live
        if not trials:
            raise UnsupportedInput(_ALL_ENDED)
        runs = [trial.run.requests for trial in trials]
        adams = None if lr_factor is None else [_scaled(trial.adam, lr_factor) for trial in trials]
        steps = send_sweep_pass(
            self._connection, runs, data, loss_fn, loss_fn_config, forward_only=forward_only, steps=adams
        )
        recorders = [_next_loss(losses_of(trial)) for trial in trials] if losses_of else []

        async def accept() -> None:
            accepting = (step.passed.accepted_async() for step in steps)
            results = await asyncio.gather(*accepting, return_exceptions=True)
            _raise_if_all(results)

        async def finish() -> SweepOutput[Result]:
            results = await asyncio.gather(*map(result_of, steps), return_exceptions=True)
            _raise_if_all(results)
            output = SweepOutput[Result]({}, {})
            for number, (trial, result) in enumerate(zip(trials, results, strict=True)):
                if isinstance(result, CotrainError):
                    output.failures[trial.number], trial.failure = result, str(result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    output.outputs[trial.number] = result
                    if recorders:
                        recorders[number](result.loss)
            return output

        made = Future(self._loop.start(accept()), self._loop.start(finish()), what=f"a batch of {self.name}")
        self._pending = {each for each in self._pending if not each.done()} | {made}
        return made

    async def _wait_for_results(self) -> None:
        """Wait for all results; each failure is in its trial."""
        waiting = (each.result_async() for each in self._pending)
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _ranked(self) -> list[Trial[RunT]]:
        """Return the live trials, the lowest score first. Raises UnsupportedInput if none has a score."""
        await self._wait_for_results()
        ranked = sorted(self.live, key=lambda trial: (trial.score, trial.number))
        if not ranked:
            raise UnsupportedInput(_ALL_ENDED)
        if math.isinf(ranked[0].score):
            raise UnsupportedInput("no trial has a finite loss to compare: train or evaluate the sweep first")
        return ranked

    async def _end(self, trials: Sequence[Trial[RunT]]) -> list[Trial[RunT]]:
        for trial in trials:
            trial.is_ended = True
        await asyncio.gather(*(trial.run.unload_async() for trial in trials))
        return list(trials)


def read_settings(settings: Sequence[Mapping[str, Any]]) -> list[tuple[LoraConfig, AdamParams]]:
    """Return the adapter and the optimizer of each trial. Raises UnsupportedInput, which names the setting."""
    if not 1 <= len(settings) <= MAX_SWEEP_RUNS:
        raise UnsupportedInput(f"a sweep has 1 to {MAX_SWEEP_RUNS} trials, not {len(settings)}: split it into several")
    return [_read(number, given) for number, given in enumerate(settings)]


def shown_settings(given: Mapping[str, Any], adam: AdamParams) -> dict[str, Any]:
    """Return settings for people: the learning rate is always among them, as `lr`."""
    others = {name: value for name, value in given.items() if ALIASES.get(name, name) != "learning_rate"}
    return {"lr": adam.learning_rate, **others}


def _read(number: int, given: Mapping[str, Any]) -> tuple[LoraConfig, AdamParams]:
    named = {ALIASES.get(name, name): value for name, value in given.items()}
    if len(named) < len(given):
        raise UnsupportedInput(f"settings[{number}]: lr and learning_rate are one setting")
    lora = LoraConfig.model_fields.keys()
    known = [*lora, *AdamParams.model_fields]
    if unknown := named.keys() - set(known):
        raise UnsupportedInput(f"settings[{number}] has no {min(unknown)}; it has lr, {', '.join(known)}")
    adapter = {name: value for name, value in named.items() if name in lora}
    optimizer = {name: value for name, value in named.items() if name not in lora}
    # Runs with one seed differ in the settings under test, and in nothing else.
    return LoraConfig(**{"seed": 0, **adapter}), AdamParams(**optimizer)


async def _passed(step: RunStep) -> ForwardBackwardOutput:
    return await step.passed


async def _trained(step: RunStep) -> TrainOutput:
    """Return both results, or raise the first failure once both have arrived."""
    assert step.stepped is not None
    await asyncio.gather(step.passed.result_async(), step.stepped.result_async(), return_exceptions=True)
    return TrainOutput(await step.passed, await step.stepped)


def _scaled(adam: AdamParams, factor: float) -> AdamParams:
    if factor == 1.0:
        return adam
    return AdamParams(**{**dict(adam), "learning_rate": adam.learning_rate * factor})


def _next_loss(losses: list[float]) -> Callable[[float], None]:
    """Reserve the next place in a list, for a result that may arrive after later ones."""
    at = len(losses)
    losses.append(math.nan)
    return lambda loss: losses.__setitem__(at, loss)


def _raise_if_all(results: Sequence[Any]) -> None:
    if all(isinstance(each, BaseException) for each in results):
        raise results[0]
