"""From an accepted request to its result: intake, scheduler, worker and engine on a real Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cotrain.wire.proto import wire_pb2
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.settings.scheduler import ClockMode
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Stack, snapshots, stack, worker
from tests.support.tiny_models import build_tiny_qwen3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")
    return Engine.load(str(folder))


def metrics_of(result: Result) -> dict[str, float]:
    assert result.kind is not ResultKind.FAILURE, result.payload
    if result.kind is ResultKind.JSON:
        return dict(result.json()["metrics"])
    return dict(wire_pb2.ForwardBackwardOutput.FromString(result.payload).metrics)


async def train(
    server: Stack, tenant: str, steps: int, lora: LoraSpec, *, wait_each: bool = False
) -> list[dict[str, float]]:
    """Train one run, submitting whole steps; return the metrics of every op in order."""
    run = await server.create(tenant, f"session-{tenant}", lora)
    data = sequences(len(tenant), 3, 12)
    requests = []
    for step in range(steps):
        requests.append(await server.forward_backward(run, 2 * step + 1, data))
        if wait_each:
            await server.result(run, requests[-1])
        requests.append(await server.optim_step(run, 2 * step + 2))
        await server.result(run, requests[-1])
    return [metrics_of(await server.result(run, request)) for request in requests]


async def test_several_tenants_train_and_their_losses_fall(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    with worker(empty_redis.url, tmp_path, engine):
        async with stack(empty_redis.url, tmp_path) as server:
            runs = [train(server, "t" * n, 4, LoraSpec(rank=n, seed=n)) for n in (1, 2, 3)]
            for metrics in await asyncio.gather(*runs):
                losses = [m["loss:sum"] for m in metrics[::2]]
                assert losses == sorted(losses, reverse=True)
                assert all("grad_norm" in m for m in metrics[1::2])


async def test_a_metronome_needs_two_cycles_for_a_naive_step_and_one_for_a_whole_one(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    with worker(empty_redis.url, tmp_path, engine):
        async with stack(
            empty_redis.url, tmp_path, mode=ClockMode.METRONOME, period_s=0.3
        ) as server:
            naive = await train(server, "naive", 3, LoraSpec(rank=2, seed=0), wait_each=True)
            whole = await train(server, "whole", 3, LoraSpec(rank=2, seed=0))
    assert cycles_per_step(naive) >= 2
    assert cycles_per_step(whole) == 1


def cycles_per_step(metrics: list[dict[str, float]]) -> float:
    ends = [m["clock_cycle:unique"] for m in metrics[1::2]]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


async def test_a_rejected_request_fails_in_its_turn_and_later_ones_run(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    with worker(empty_redis.url, tmp_path, engine):
        async with stack(empty_redis.url, tmp_path) as server:
            run = await server.create("a", "s", LoraSpec(rank=2, seed=0))
            body = Result.failed("rank must be…", "user").payload
            bad = await server.intake.submit(run, 1, OpKind.REJECTED, body, 0, "1")
            good = await server.forward_backward(run, 2, sequences(0, 1, 5))
            assert (await server.result(run, bad)).json()["category"] == "user"
            assert "loss:sum" in metrics_of(await server.result(run, good))


async def test_a_worker_restarted_from_nothing_goes_on_with_the_same_numbers(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    data = sequences(1, 2, 20)

    async def steps(server: Stack, tenant: str, restart: bool) -> list[dict[str, float]]:
        run = await server.create(tenant, tenant, LoraSpec(rank=4, seed=7))
        metrics: list[dict[str, float]] = []
        for half in range(2):
            with worker(empty_redis.url, tmp_path, engine, tuning=snapshots(ops=3 + 100 * half)):
                for step in range(3 * half, 3 * half + 3):
                    first = await server.forward_backward(run, 2 * step + 1, data)
                    second = await server.optim_step(run, 2 * step + 2)
                    metrics.append(metrics_of(await server.result(run, first)))
                    metrics.append(metrics_of(await server.result(run, second)))
                if not restart:
                    continue
            engine.adapters.drop(run.id)
        return [{k: v for k, v in m.items() if "cycle" not in k} for m in metrics]

    async with stack(empty_redis.url, tmp_path) as server:
        assert await steps(server, "a", restart=True) == await steps(server, "b", restart=False)
