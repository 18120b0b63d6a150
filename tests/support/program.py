"""Short training program, and its results without disturbance."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cotrain.wire.proto import wire_pb2
from cotrain.wire.rest import HistoryPoint
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, RunId, request_id
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.training.drift import LAG_METRICS
from cotrain_workers.results import CYCLE_METRIC
from tests.support.bodies import sequences
from tests.support.stack import POOL, Home, Stack, make_worker, worker

LORA = LoraSpec(rank=4, seed=7)
#: Run of `train_undisturbed`.
UNDISTURBED = RunId(f"undisturbed-{LORA.optimizer}:train:0")
STEPS = 3
#: Ops of one step: two gradients that add up, an evaluation between them, an optimizer step.
STEP = (OpKind.FORWARD_BACKWARD, OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP)
#: All ops of a run after its creation. At its end, a gradient is pending.
PROGRAM = (*STEP * STEPS, OpKind.FORWARD_BACKWARD)


async def submit(server: Stack, run: RunRecord, first: int, last: int, *, place: int | None = None) -> list[RequestId]:
    """Submit the ops first…last of the program, with their own numbers or from `place` on.

    The passes report their lag, which a replay cannot compute.
    """
    requests = []
    for number in range(first, last + 1):
        seq = number if place is None else place + number - first
        kind = PROGRAM[number - 1]
        if kind is OpKind.OPTIM_STEP:
            requests.append(await server.optim_step(run, seq))
        else:
            requests.append(await server.forward_backward(run, seq, sequences(number, 2, 9), kind, policy_step=0))
    return requests


async def results(server: Stack, run: RunRecord, requests: list[RequestId]) -> list[Any]:
    """Wait for results. Their cycles are removed, because they may differ."""
    return [without_cycle(await server.result(run, request)) for request in requests]


def without_cycle(result: Result) -> Any:
    """Decode a result, without its cycle, its policy lag and the name of its run. A run from a checkpoint counts its own steps."""
    if result.kind is ResultKind.PASS:
        output = wire_pb2.ForwardBackwardOutput.FromString(result.payload)
        for name in (CYCLE_METRIC, *LAG_METRICS):
            output.metrics.pop(name, None)
        return output.SerializeToString(deterministic=True)
    decoded = result.json()
    decoded.get("metrics", {}).pop(CYCLE_METRIC, None)
    decoded.pop("model_id", None)
    return decoded


async def undisturbed(server: Stack, engine: Engine, last: int = len(PROGRAM)) -> tuple[list[Any], str]:
    """Return the results of the program and the digest of its state, computed once by each engine."""
    known = _UNDISTURBED.setdefault(engine, {})
    if last not in known:
        known[last] = await train_undisturbed(server, engine, last)
    return known[last]


async def train_undisturbed(
    server: Stack, engine: Engine, last: int = len(PROGRAM), lora: LoraSpec = LORA
) -> tuple[list[Any], str]:
    """Run the program in a run "undisturbed". Return its results and the digest of its state."""
    with worker(server, engine):
        run = await server.create("undisturbed", f"undisturbed-{lora.optimizer}", lora)
        answers = await results(server, run, await submit(server, run, 1, last))
    return answers, engine.adapters.state(run.id).digest()


_UNDISTURBED: WeakKeyDictionary[Engine, dict[int, tuple[list[Any], str]]] = WeakKeyDictionary()
"""Results of the undisturbed program, by engine and number of requests."""


def computed(answers: list[Any]) -> list[tuple[str, int, float, float | None]]:
    """Return the numbers of each step from the answers to the program, to compare with `numbers_of` its history."""
    numbers: list[tuple[str, int, float, float | None]] = []
    loss, steps = 0.0, 0
    for kind, answer in zip(PROGRAM, answers, strict=True):
        if kind is OpKind.OPTIM_STEP:
            steps += 1
            numbers.append((kind.value, steps, loss, answer["metrics"]["grad_norm"]))
            loss = 0.0
            continue
        found = wire_pb2.ForwardBackwardOutput.FromString(answer).metrics["loss:sum"]
        if kind is OpKind.FORWARD:
            numbers.append((kind.value, steps, found, None))
        else:
            loss += found
    return numbers


def numbers_of(points: list[HistoryPoint]) -> list[tuple[str, int, float, float | None]]:
    """Return the numbers in a history that its client computed."""
    return [(point.kind, point.step, point.loss_sum, point.grad_norm) for point in points]


def snapshot_files(redis: Any, run: RunRecord, folder: Path) -> list[Path]:
    """Return the files of a run's registered snapshots, newest first."""
    files = redis.hmget(redis_keys.log(POOL, run.id), ["snapfile", "oldfile"])
    return [folder / "snapshots" / file.decode() for file in files if file]


async def killed_after(server: Stack, engine: Engine, last: int) -> tuple[RunRecord, RunRecord]:
    """Train a run and its neighbour in one cycle up to seq `last`. Only their logs remain."""
    broken, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
    for run in (broken, neighbour):
        await submit(server, run, 1, last)
    with worker(server, engine, drains=False):
        for run in (broken, neighbour):
            await server.result(run, request_id(run.id, last))
    return broken, neighbour


def restored_digest(home: Stack | Home, engine: Engine, run: RunId) -> str:
    """Restore a run from stored data, as a new worker would. Return the digest of its state."""
    engine.adapters.drop(run)
    loop, opened = make_worker(home, engine)
    run_to_end(loop._runs.ensure(run))
    opened.close()
    return engine.adapters.state(run).digest()
