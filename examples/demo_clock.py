"""Clock cycles of a training step, for three ways to write its loop.

Requires a server in metronome mode, whose cycles start on a tick, as those of hosted services do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from demo_tenants import TENANTS, Corpus, datum
from how_far import Report

from cotrain import AdamParams, Datum, Future, ServiceClient, TrainingClient
from cotrain.types import ForwardBackwardOutput, OptimStepResponse

SentStep = tuple[Future[ForwardBackwardOutput], Future[OptimStepResponse]]
TrainLoop = Callable[[TrainingClient, list[Datum], int], list[float]]

STEPS = 5
ADAM = AdamParams(learning_rate=1e-3)


@dataclass(frozen=True)
class Cost:
    """Cost of one step of a loop."""

    cycles: float
    seconds: float


def measure_loops(address: str, base_model: str, corpus: Corpus, report: Report) -> dict[str, Cost]:
    """Train `STEPS` steps with each of `LOOPS`, and call `report` after each loop."""
    costs = {}
    tenant = TENANTS[0]
    with ServiceClient(address, tenant.key) as service:
        run = service.create_lora_training_client(base_model, rank=8, seed=1)
        rows = corpus.batch(tenant.kind, step=0)[:2]
        data = [datum(row, weights=[1.0] * (len(row) - 1)) for row in rows]
        for done, (name, loop) in enumerate(LOOPS.items(), 1):
            costs[name] = _cost(loop, run, data)
            report(done, len(LOOPS), name)
    return costs


def naive(run: TrainingClient, data: list[Datum], steps: int) -> list[float]:
    """Wait for each result before sending the next request."""
    cycles = []
    for _ in range(steps):
        output = run.forward_backward(data, "cross_entropy").result()
        run.optim_step(ADAM).result()
        cycles.append(_cycle(output))
    return cycles


def submit_both(run: TrainingClient, data: list[Datum], steps: int) -> list[float]:
    """Send both requests of a step, then wait for both."""
    return [_cycle(_wait(_send(run, data))) for _ in range(steps)]


def pipelined(run: TrainingClient, data: list[Datum], steps: int) -> list[float]:
    """Send the next step before waiting for this one."""
    cycles, sent = [], _send(run, data)
    for _ in range(steps - 1):
        following = _send(run, data)
        cycles.append(_cycle(_wait(sent)))
        sent = following
    return [*cycles, _cycle(_wait(sent))]


LOOPS: Mapping[str, TrainLoop] = {"naive": naive, "submit both": submit_both, "pipelined": pipelined}


def _cost(loop: TrainLoop, run: TrainingClient, data: list[Datum]) -> Cost:
    _wait(_send(run, data))  # from here on, requests follow the ticks
    started_at = time.monotonic()
    cycles = loop(run, data, STEPS)
    elapsed_s = time.monotonic() - started_at
    return Cost((cycles[-1] - cycles[0]) / (STEPS - 1), elapsed_s / STEPS)


def _send(run: TrainingClient, data: list[Datum]) -> SentStep:
    return run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)


def _wait(sent: SentStep) -> ForwardBackwardOutput:
    output, step = sent
    step.result()
    return output.result()


def _cycle(output: ForwardBackwardOutput) -> float:
    return output.metrics["clock_cycle:unique"]
