"""One processor for training and for many sample requests: neither starves, and all finish."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain_store.messages.ids import sample_id
from cotrain_store.messages.ops import ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import Progress, SampleRequest
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.training.batch_runner import BatchRunner
from tests.support.bodies import sequences
from tests.support.draws import variant
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import LONG, base_sampler, ended, saved_sampler, submit_sample
from tests.support.stack import Stack, worker
from tests.support.waiting import until

MICRO_BATCH_S = 1.0
DECODE_STEP_S = 0.3


@dataclass
class Processor:
    """A simulated clock that only work advances, and the work done while a step was open."""

    now: float = 0.0
    in_step: bool = False
    trained: float = 0.0
    decoded: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def train(self) -> None:
        self.now += MICRO_BATCH_S
        self.trained += MICRO_BATCH_S
        self.in_step = True

    def decode(self) -> None:
        self.now += DECODE_STEP_S
        self.decoded += DECODE_STEP_S * self.in_step


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    """Make every micro-batch and every decode step take a fixed time on a simulated clock."""
    clock = Processor()
    micro_batch, decode_step, run = (BatchRunner.run, EngineDecoder.step, Engine.cycle)

    def trained(self: BatchRunner, *args: Any) -> Any:
        ran = micro_batch(self, *args)
        clock.train()
        return ran

    def decoded(self: EngineDecoder) -> Progress:
        clock.decode()
        return decode_step(self)

    def ran(self: Engine, *args: Any) -> Any:
        output = yield from run(self, *args)
        clock.in_step = False
        return output

    monkeypatch.setattr(BatchRunner, "run", trained)
    monkeypatch.setattr(EngineDecoder, "step", decoded)
    monkeypatch.setattr(Engine, "cycle", ran)
    fake = SimpleNamespace(monotonic=clock.monotonic, time=time.time)
    monkeypatch.setattr("cotrain_workers.worker.device_time.time", fake)
    return clock


@pytest.fixture(scope="module")
def small_steps(tiny_model: Path) -> Engine:
    """An engine with small micro-batches, so that a step has many."""
    import torch

    torch.set_num_threads(1)
    return Engine.load(str(tiny_model), micro_batch_tokens=256)


@pytest.mark.parametrize("share", [0.25, variant(0.75)])
async def test_many_requests_finish_and_training_keeps_its_share(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, small_steps: Engine, processor: Processor, share: float
) -> None:
    """The requests use 8 adapters, and memory holds 16."""
    with worker(empty_redis.url, tmp_path, small_steps, sampling_share=share, kv_cache_tokens=16 * 64) as loop:
        samplers = []
        for number in range(8):
            run = await server.create(f"t{number}", f"t{number}", LoraSpec(rank=2, seed=number))
            samplers.append(await saved_sampler(server, run, 1))
        changes = {"prompt": tuple(range(1, 20)), "max_tokens": 40}
        requests = [
            (sampler, await submit_sample(server, sampler, seq, LONG, seed=seq, **changes))
            for seq in range(9)
            for sampler in samplers
        ]
        run = await server.create("a", "a", LoraSpec(rank=2, seed=0))
        data = sequences(0, 16, 120)
        training = [await server.forward_backward(run, seq, data) for seq in range(1, 3)]
        await server.result(run, training[-1])
        both = processor.trained + processor.decoded
        assert processor.decoded > 0
        assert processor.trained >= (1 - share) * (both - DECODE_STEP_S)
        assert processor.decoded >= share * (both - MICRO_BATCH_S) - 1e-6
        ends = await asyncio.gather(*(ended(server, sampler, r) for sampler, r in requests))
        assert all(end.kind is ResultKind.SAMPLE for end in ends)
        assert loop._sampler.running == 0


async def test_a_tenant_with_many_requests_does_not_make_another_wait_for_them(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    crowd, single = await base_sampler(server, "crowd"), await base_sampler(server, "single")
    many = [await submit_sample(server, crowd, seq, seed=seq) for seq in range(300)]
    one = await submit_sample(server, single, 0)
    with worker(empty_redis.url, tmp_path, engine):
        await ended(server, single, one)
        behind = server.futures.wait(crowd.tenant, many[-1], 0)
        assert not hasattr(await behind, "kind")
        await server.samples.cancel(crowd.tenant, many[-1])


async def test_a_sample_next_to_twenty_long_requests_ends_in_ten_steps(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count its steps from its claim by the worker; memory is full of the other tenant's sequences."""
    steps: list[list[str]] = []
    added_at: dict[str, int] = {}
    step, add = EngineDecoder.step, EngineDecoder.add

    def counted(self: EngineDecoder) -> Progress:
        progress = step(self)
        steps.append([name for name, _ in progress.finished])
        return progress

    def noted(self: EngineDecoder, request: SampleRequest) -> None:
        added_at[request.id] = len(steps)
        add(self, request)

    monkeypatch.setattr(EngineDecoder, "step", counted)
    monkeypatch.setattr(EngineDecoder, "add", noted)
    heavy, light = await base_sampler(server, "heavy"), await base_sampler(server, "light")
    for seq in range(20):
        await submit_sample(server, heavy, seq, LONG, num_samples=64, max_tokens=190)
    with worker(empty_redis.url, tmp_path, engine, kv_cache_tokens=16 * 64):
        await until(lambda: len(steps) >= 30)
        one = await submit_sample(server, light, 0, max_tokens=8)
        await ended(server, light, one)
        for seq in range(20):
            await server.samples.cancel(heavy.tenant, sample_id(heavy.id, seq))
    at = next(at for at, finished in enumerate(steps) if one in finished)
    assert at - added_at[one] < 8 + 2
