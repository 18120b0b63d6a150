"""Prefetch of bodies before their step: found, used once, and without any other effect."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

from cotrain.wire.proto import wire_pb2
from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput, Failure, Pass
from cotrain_workers.worker import step_runner
from cotrain_workers.worker.step_runner import Prefetcher
from tests.support.bodies import pass_body, sequences
from tests.support.log import Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Home, make_worker, stack, worker
from tests.support.tiny_models import build_tiny_qwen3

BODY = pass_body("r", 1, sequences(0, 2, 9))
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner, "LOOK_S", 0.001)


def look(looker: Prefetcher, step: Step, count: int) -> None:
    """Prefetch after a step until `count` bodies are decoded."""
    give_up_at = time.monotonic() + PATIENCE_S
    with looker.during(step):
        while len(looker._decoded) != count:
            assert time.monotonic() < give_up_at, looker._decoded
            time.sleep(0.001)


async def submit_behind(log: Log, *bodies: bytes) -> tuple[Step, list[QueuedOp]]:
    """Plan a step, and accept bodies after it."""
    run = await log.new_run()
    step = await log.plan()
    for seq, body in enumerate(bodies, start=1):
        await log.submit(run, seq, body=body)
    return step, log.execution.logs.waiting_after(step, 8)


async def test_a_body_is_decoded_ahead_and_used_once(log: Log) -> None:
    step, (op,) = await submit_behind(log, BODY)
    looker = Prefetcher(log.execution)

    look(looker, step, 1)

    decoded = looker.take(op, BODY)
    assert isinstance(decoded, Pass)
    assert (decoded.run, decoded.seq, len(decoded.datums)) == (op.run, 1, 2)
    assert looker.take(op, BODY) is None


async def test_another_body_or_op_is_decoded_when_it_is_planned(log: Log) -> None:
    step, (op,) = await submit_behind(log, BODY)
    looker = Prefetcher(log.execution)

    look(looker, step, 1)

    assert looker.take(replace(op, seq=2), BODY) is None
    assert looker.take(op, BODY + b" ") is None


async def test_an_unreadable_body_fails_as_when_it_is_planned(log: Log) -> None:
    step, (op,) = await submit_behind(log, b"no message")
    looker = Prefetcher(log.execution)

    look(looker, step, 1)

    failure = looker.take(op, b"no message")
    assert isinstance(failure, Failure)
    assert failure.category == "user"


async def test_prefetch_ends_at_a_gap(log: Log) -> None:
    run, other = await log.new_run("a"), await log.new_run("b")
    step = await log.plan()
    assert log.execution.logs.waiting_after(step, 8) == []
    for seq in (1, 2, 4):
        await log.submit(run, seq)
    await log.submit(other, 1, OpKind.OPTIM_STEP)

    waiting = log.execution.logs.waiting_after(step, 8)

    assert {op.id for op in waiting} == {(run.id, 1), (run.id, 2), (other.id, 1)}
    assert [op.kind for op in waiting if op.run == other.id] == [OpKind.OPTIM_STEP]
    assert len(log.execution.logs.waiting_after(step, 1)) == 2


async def test_prefetched_bodies_are_few_and_short_lived(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    step, ops = await submit_behind(log, BODY, BODY, BODY)
    monkeypatch.setattr(step_runner, "MAX_BYTES", 2 * len(BODY))
    looker = Prefetcher(log.execution)

    look(looker, step, 2)
    assert set(looker._decoded) == set(ops[:2])

    look(looker, replace(step, ops=()), 0)


async def test_small_bodies_are_read_together(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    step, ops = await submit_behind(log, BODY, BODY, BODY)
    bodies = Mock(wraps=log.execution.bodies)
    monkeypatch.setattr(log.execution, "bodies", bodies)

    look(Prefetcher(log.execution), step, 3)

    assert bodies.call_args_list[0] == call(ops)


class Ticks(threading.Event):
    """Event that is set after some waits, which it records."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._most = most

    @override
    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return len(self.waits) > self._most


async def test_a_long_step_is_looked_behind_less_and_less_often(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_runner, "LOOK_S", 0.1)
    step, _ = await submit_behind(log)
    ticks = Ticks(5)

    Prefetcher(log.execution)._look(step, ticks)

    assert ticks.waits == [0.1, 0.2, 0.4, 0.8, 0.8, 0.8]


async def test_an_unavailable_redis_ends_the_prefetch_and_not_the_step(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = await submit_behind(log, BODY)
    asked = []

    def is_away(step: Step, most: int) -> list[QueuedOp]:
        asked.append(step)
        raise RedisConnectionError

    monkeypatch.setattr(log.execution.logs, "waiting_after", is_away)
    with Prefetcher(log.execution).during(step):
        for thread in threading.enumerate():
            if thread.name == "prefetch":
                thread.join(PATIENCE_S)  # it ends without help

    assert len(asked) == 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")
    return Engine.load(str(folder))


async def losses(url: str, folder: Path, engine: Engine) -> list[float]:
    """Train a run whose requests are all queued at once. Return each pass's loss."""
    async with stack(url, folder) as server:
        run = await server.create("a", "session-a", LoraSpec(rank=2, seed=0))
        sent = []
        for step in range(6):
            sent.append(await server.forward_backward(run, 2 * step + 1, sequences(step, 4, 40)))
            await server.optim_step(run, 2 * step + 2)
        with worker(server, engine):
            results = [await server.result(run, request) for request in sent]
    engine.adapters.drop(run.id)
    outputs = [wire_pb2.ForwardBackwardOutput.FromString(each.payload) for each in results]
    return [dict(output.metrics)["loss:sum"] for output in outputs]


async def test_training_is_identical_with_and_without_prefetch(
    empty_redis: EmbeddedRedis,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[bool] = []
    take = Prefetcher.take

    def noting(self: Prefetcher, op: QueuedOp, body: bytes) -> Pass | Failure | None:
        found = take(self, op, body)
        if op.kind in step_runner.PASSES:
            notes.append(found is not None)
        return found

    decode, has_decoded = Prefetcher._decode, threading.Event()

    def decoding(self: Prefetcher, *behind: Any) -> None:
        decode(self, *behind)
        if self._decoded:
            has_decoded.set()

    cycle = Engine.cycle

    def slow(self: Engine, *step: Any) -> Yielding[CycleOutput]:
        """Compute a step, which takes at least as long as the first prefetch after it."""
        assert has_decoded.wait(PATIENCE_S)
        return (yield from cycle(self, *step))

    monkeypatch.setattr(Prefetcher, "take", noting)
    monkeypatch.setattr(Prefetcher, "_decode", decoding)
    monkeypatch.setattr(Engine, "cycle", slow)
    decoded_ahead = await losses(empty_redis.url, tmp_path / "ahead", engine)
    assert len(notes) == 6
    assert any(notes)

    redis_server.flush()
    notes.clear()
    monkeypatch.setattr(step_runner, "LOOK_S", 3600.0)
    when_planned = await losses(empty_redis.url, tmp_path / "planned", engine)

    assert notes == [False] * 6
    assert decoded_ahead == when_planned


async def test_the_runs_that_wait_for_a_plan_are_recorded_once(log: Log) -> None:
    step, _ = await submit_behind(log, BODY)
    late = await log.new_run()
    looker = Prefetcher(log.execution)

    look(looker, step, 1)

    assert looker.ready_runs() == [late.id]
    assert looker.ready_runs() == []


def test_adapters_of_waiting_runs_are_prefetched_while_memory_lasts(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def prefetch(runs: list[str]) -> None:
        asked.append(runs)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.adapters, "prefetch", prefetch)
    loop, opened = make_worker(Home(empty_redis.url, tmp_path), engine)
    loop._prefetcher._ready = [RunId("b"), RunId("c")]

    loop._at_yield_point()
    loop._at_yield_point()

    assert asked == [["b", "c"]]
    opened.close()
