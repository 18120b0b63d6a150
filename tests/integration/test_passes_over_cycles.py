"""A pass larger than a cycle: other work runs in between, and after any crash its bits are those of
the whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cotrain.wire.proto import wire_pb2
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, RunId, TenantId, WorkerId, request_id
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind, Step
from cotrain_store.messages.runs import RunRecord
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, OptimStep
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.op_codec import decode_op_pass, decoding_shared_pass
from cotrain_workers.results import CYCLE_METRIC, result_of
from cotrain_workers.worker import step_runner
from tests.support.bodies import pass_body, sequences
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import LORA, without_cycle
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, stack, worker
from tests.support.waiting import until

#: Such a short cycle is out of time after its first micro-batch, so it runs one slice of each pass.
PERIOD_S = 1e-5
SLICE, SLICES = 60, 8
DATA = sequences(1, SLICES, SLICE)
TOKENS = SLICE * SLICES
LR = 1e-2


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine.load(str(tiny_model), micro_batch_tokens=64)


@pytest.fixture
async def server(empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr("cotrain_workers.worker.loop.IDLE_S", 0.02)
    async with stack(empty_redis.url, tmp_path, period_s=PERIOD_S) as opened:
        yield opened


async def submit_two_steps(server: Stack, run: RunRecord) -> list[RequestId]:
    """Send a large pass, a forward of the same size, an optimizer step, and the same again."""
    requests = []
    for first in (1, 4):
        requests.append(await server.forward_backward(run, first, DATA))
        requests.append(await server.forward_backward(run, first + 1, DATA, OpKind.FORWARD))
        requests.append(await server.optim_step(run, first + 2, LR))
    return requests


@pytest.fixture(scope="module")
def whole(engine: Engine) -> tuple[list[Any], str]:
    """Return the results of these requests with each pass in one cycle of the engine, and the
    digest of the final state."""
    run = "whole:train:0"
    spec = AdapterSpec(rank=LORA.rank, seed=LORA.seed)
    answers = []
    engine.run([Create(run, 0, spec)])
    for seq in range(1, 7):
        kind = (OpKind.FORWARD_BACKWARD, OpKind.FORWARD, OpKind.OPTIM_STEP)[(seq - 1) % 3]
        op = QueuedOp(RunId(run), seq, kind, 0, "inline", 0, 0.0)
        request = (
            OptimStep(run, seq, LR, 0.9, 0.95, 1e-8, 0.0, 0.0)
            if kind is OpKind.OPTIM_STEP
            else decode_op_pass(op, pass_body(run, seq, DATA, forward_only=kind is OpKind.FORWARD))
        )
        output = engine.run([request]).outputs[run, seq]  # type: ignore[list-item]  # no Failure
        answers.append(without_cycle(result_of(op, output, cycle=0)))
    digest = engine.adapters.state(run).digest()
    engine.adapters.drop(run)
    return answers, digest


def cycle_of(result: Result) -> int:
    if result.kind is ResultKind.PASS:
        metrics: Mapping[str, float] = wire_pb2.ForwardBackwardOutput.FromString(result.payload).metrics
        return int(metrics[CYCLE_METRIC])
    return int(result.json()["metrics"][CYCLE_METRIC])


def begun(redis: Any, run: RunRecord) -> bytes | None:
    found: bytes | None = redis.hget(redis_keys.log(POOL, run.id), "begun")
    return found


def counted(redis: Any, name: str) -> float:
    return float(redis.hget(redis_keys.counters(POOL), name) or 0)


def used(redis: Any, tenant: str) -> dict[str, float]:
    """Sum the usage of a tenant, by kind."""
    found: dict[str, float] = {}
    for key in redis.scan_iter(redis_keys.usage(TenantId(tenant), 0).rpartition(":")[0] + ":*"):
        for field, amount in redis.hgetall(key).items():
            what = field.decode().partition("|")[0]
            found[what] = found.get(what, 0.0) + float(amount)
    return found


async def answers_of(server: Stack, run: RunRecord, requests: list[RequestId]) -> list[Result]:
    return [await server.result(run, request) for request in requests]


async def test_a_neighbour_of_a_pass_of_many_cycles_waits_for_at_most_one(
    server: Stack, engine: Engine, redis: Any, whole: tuple[list[Any], str]
) -> None:
    """Its ops run at the latest in the cycle after the one that is running when they are accepted."""
    expected, digest = whole
    large = await server.create("large", "large", LORA)
    requests = await submit_two_steps(server, large)
    late = []
    with worker(server, engine):
        await until(lambda: begun(redis, large) is not None)
        small = await server.create("small", "small", LORA)
        await server.result(small, request_id(small.id, 0))
        for seq in range(1, 5):
            if seq % 2:
                request = await server.forward_backward(small, seq, DATA[:1])
            else:
                request = await server.optim_step(small, seq)
            in_work = int(counted(redis, "cycles")) + 1
            late.append(cycle_of(await server.result(small, request)) - in_work)
        results = await answers_of(server, large, requests)
    # On a busy machine, the scheduler may be notified of one op after it has made the next plan.
    assert sorted(late)[-2] <= 1
    assert max(late) < SLICES
    assert cycle_of(results[0]) > SLICES // 2, "the large pass was over too soon"
    assert [without_cycle(result) for result in results] == expected
    assert engine.adapters.state(large.id).digest() == digest
    cycles = [cycle_of(result) for result in results]
    assert cycles[3] - cycles[2] >= SLICES
    assert used(redis, "large")["training_tokens"] == 4 * TOKENS
    assert counted(redis, "tokens") == 4 * TOKENS + 2 * SLICE


KILLS = [
    variant(Failpoint("open_steps", 3)),
    Failpoint("begin", SLICES + 4),
    variant(Failpoint("commit", 3)),
    Failpoint("commit", SLICES + 4, after=True),
]


@pytest.mark.parametrize("failpoint", KILLS, ids=str)
async def test_a_worker_killed_in_the_middle_of_a_pass_leaves_no_partial_result(
    server: Stack, engine: Engine, redis: Any, failpoint: Failpoint, whole: tuple[list[Any], str]
) -> None:
    """Neither the numbers nor the usage of the tenant and of the pool contain a partial result."""
    expected, digest = whole
    run = await server.create("a", "a", LORA)
    requests = await submit_two_steps(server, run)
    async with dying_worker(server, engine, failpoint):
        pass
    with worker(server, engine):
        results = await answers_of(server, run, requests)
    assert [without_cycle(result) for result in results] == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert used(redis, "a")["training_tokens"] == counted(redis, "tokens") == 4 * TOKENS
    assert counted(redis, "resolved_ops") == 7


async def test_a_crashed_step_runs_its_pass_to_the_end(server: Stack, engine: Engine) -> None:
    """Otherwise a request that crashes after its third slice would crash in a new step each time,
    and the crashes would not be counted."""
    run = await server.create("a", "a", LORA)
    request = await server.forward_backward(run, 1, DATA)
    async with dying_worker(server, engine, Failpoint("commit", 4)):
        pass
    with worker(server, engine):
        assert cycle_of(await server.result(run, request)) == 4


async def test_a_worker_replaced_in_the_middle_of_a_pass_restarts_it(
    server: Stack, engine: Engine, redis: Any, whole: tuple[list[Any], str]
) -> None:
    expected, digest = whole
    run = await server.create("a", "a", LORA)
    requests = await submit_two_steps(server, run)
    for _ in range(2):
        with worker(server, engine):
            await until(lambda: begun(redis, run) is not None)
    with worker(server, engine):
        results = await answers_of(server, run, requests)
    assert [without_cycle(result) for result in results] == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert used(redis, "a")["training_tokens"] == 4 * TOKENS


async def test_a_run_closed_in_the_middle_of_a_pass_leaves_memory_at_once(
    server: Stack, engine: Engine, redis: Any
) -> None:
    run = await server.create("a", "a", LORA)
    request = await server.forward_backward(run, 1, sequences(2, 400, SLICE))
    with worker(server, engine):
        await until(lambda: begun(redis, run) is not None)
        await server.intake.close_run(run)
        assert (await server.result(run, request)).kind is ResultKind.FAILURE
        await until(lambda: run.id not in engine.adapters)
        assert not engine.open_passes.runs
    assert counted(redis, "tokens") == 0
    assert used(redis, "a")["training_tokens"] == 0


async def test_the_body_of_a_pass_is_read_once(server: Stack, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    request = await server.forward_backward(run, 1, DATA)
    read: list[QueuedOp] = []
    with worker(server, engine) as loop:
        bodies = loop._execution.bodies

        def noted(ops: Any) -> Any:
            read.extend(ops)
            return bodies(ops)

        loop._runner._execution.bodies = noted  # type: ignore[method-assign]
        assert cycle_of(await server.result(run, request)) >= SLICES
    assert len([op for op in read if op.seq == 1]) <= 1


async def test_a_late_step_decodes_one_divided_pass_and_leaves_the_others(
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[list[Any], str],
) -> None:
    """Plans count tokens, and decoding takes time by datums. So it has a share of each step, here none."""
    monkeypatch.setattr("cotrain_workers.worker.loop.IDLE_S", 0.02)
    monkeypatch.setattr("cotrain_workers.worker.loop.DECODE_SHARE", -1.0)
    monkeypatch.setattr("cotrain_workers.worker.step_runner.LOOK_S", 60.0)
    monkeypatch.setattr("cotrain_scheduler.planner.GROWTH", 0)
    monkeypatch.setattr("cotrain_scheduler.planner.FIRST_TOKENS", TOKENS)
    divided: list[int] = []  # passes with an allowance, by step
    decoded: list[int] = []
    decoding = decoding_shared_pass

    def noted(*args: Any) -> Any:
        decoded[-1] += 1
        return decoding(*args)

    monkeypatch.setattr(step_runner, "decoding_shared_pass", noted)
    async with stack(empty_redis.url, tmp_path, period_s=10.0) as server:
        runs = [await server.create(name, name, LORA) for name in "abc"]
        requests = [await server.forward_backward(run, 1, DATA) for run in runs]
        with worker(server, engine) as loop:
            begin = loop._execution.begin

            def begun(step: Step) -> None:
                divided.append(len(step.allowances))
                decoded.append(0)
                begin(step)

            loop._execution.begin = begun  # type: ignore[method-assign]
            results = [await server.result(run, each) for run, each in zip(runs, requests, strict=True)]
    assert max(divided) == len(runs)
    assert all(count <= 1 for count, passes in zip(decoded, divided, strict=True) if passes > 1)
    assert [without_cycle(result) for result in results] == whole[0][:1] * len(runs)


async def test_an_open_pass_of_a_moved_run_restarts_on_the_other_worker(
    server: Stack, engine: Engine, tiny_model: Path, redis: Any, whole: tuple[list[Any], str]
) -> None:
    expected, digest = whole
    other = Engine.load(str(tiny_model), micro_batch_tokens=64)
    run = await server.create("large", "large", LORA)
    target = WorkerId("w1")
    with worker(server, engine) as owner:
        await server.result(run, request_id(run.id, 0))
        with worker(server, other, worker_id=target):
            await until(lambda: redis.exists(redis_keys.worker(POOL, target)))
            requests = await submit_two_steps(server, run)
            await until(lambda: begun(redis, run) is not None)
            await server.dispatch.moves.request(POOL, run.id, target)
            await until(lambda: redis.hget(redis_keys.log(POOL, run.id), "worker") == b"w1")
            await until(lambda: run.id not in owner._engine.open_passes.runs)
            results = await answers_of(server, run, requests)
    assert [without_cycle(result) for result in results] == expected
    assert other.adapters.state(run.id).digest() == digest
    assert counted(redis, "moves") == 1
    assert counted(redis, "replayed_ops") == 0


LONG_TOKENS = 500
"""Tokens of one datum, more than a micro-batch of 64 tokens: the pass stops between two layers."""
LONG = sequences(3, 1, LONG_TOKENS)


async def submit_long(server: Stack, run: RunRecord) -> list[RequestId]:
    requests = [await server.forward_backward(run, 1, LONG), await server.optim_step(run, 2, LR)]
    requests.append(await server.forward_backward(run, 3, LONG, OpKind.FORWARD))
    return requests


@pytest.fixture
def long_answers(engine: Engine) -> tuple[list[Any], str]:
    """Return the answers to the ops of `submit_long`, each run in one cycle, and the digest of the
    state."""
    run, answers = "whole-long:train:0", []
    engine.run([Create(run, 0, AdapterSpec(rank=LORA.rank, seed=LORA.seed))])
    for seq, kind in enumerate((OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.FORWARD), 1):
        op = QueuedOp(RunId(run), seq, kind, 0, "inline", 0, 0.0)
        request = (
            OptimStep(run, seq, LR, 0.9, 0.95, 1e-8, 0.0, 0.0)
            if kind is OpKind.OPTIM_STEP
            else decode_op_pass(op, pass_body(run, seq, LONG, forward_only=kind is OpKind.FORWARD))
        )
        output = engine.run([request]).outputs[run, seq]  # type: ignore[list-item]  # no Failure
        answers.append(without_cycle(result_of(op, output, cycle=0)))
    digest = engine.adapters.state(run).digest()
    engine.adapters.drop(run)
    return answers, digest


async def test_passes_of_a_neighbour_run_between_the_layers_of_a_long_datum(
    server: Stack, engine: Engine, redis: Any, long_answers: tuple[list[Any], str]
) -> None:
    expected, digest = long_answers
    large = await server.create("large", "large", LORA)
    requests = await submit_long(server, large)
    small = await server.create("small", "small", LORA)
    with worker(server, engine):
        await until(lambda: begun(redis, large) is not None)
        passed = await server.result(small, await server.forward_backward(small, 1, DATA[:1]))
        results = await answers_of(server, large, requests)
    assert cycle_of(passed) < cycle_of(results[0]), "it waited for the long datum"
    assert [without_cycle(result) for result in results] == expected
    assert engine.adapters.state(large.id).digest() == digest
    assert counted(redis, "tokens") == 2 * LONG_TOKENS + SLICE


LONG_KILLS = [
    Failpoint("begin", 4),
    Failpoint("commit", 4, after=True),
    *(variant(Failpoint("begin", call)) for call in (2, 6)),
    *(variant(Failpoint("commit", call, after=True)) for call in (2, 6)),
]


@pytest.mark.parametrize("failpoint", LONG_KILLS, ids=str)
async def test_a_kill_between_layers_of_a_long_datum_leaves_no_partial_result(
    server: Stack, engine: Engine, redis: Any, failpoint: Failpoint, long_answers: tuple[list[Any], str]
) -> None:
    expected, digest = long_answers
    run = await server.create("a", "a", LORA)
    requests = await submit_long(server, run)
    async with dying_worker(server, engine, failpoint):
        pass
    with worker(server, engine):
        results = await answers_of(server, run, requests)
    assert [without_cycle(result) for result in results] == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert used(redis, "a")["training_tokens"] == counted(redis, "tokens") == 2 * LONG_TOKENS
