"""From a saved adapter to its samples: a worker that trains and samples at once, and neither kind of work starves."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.wire.proto import wire_pb2
from cotrain_store import redis_keys
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.messages.ids import sample_id
from cotrain_store.messages.ops import ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.sampling.token_stream import TokenStream
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import SampleRequest, StepResults
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.training.batch_runner import BatchRunner
from tests.support.bodies import sequences
from tests.support.draws import variant
from tests.support.program import LORA, submit
from tests.support.sampling import (
    LONG,
    SHORT,
    base_sampler,
    ended,
    named_sampler,
    sample,
    sampled,
    saved_sampler,
    submit_sample,
    submit_save,
)
from tests.support.stack import POOL, Stack, worker
from tests.support.waiting import PATIENCE_S, until


async def test_a_samplers_results_do_not_move_while_its_run_trains_on(server: Stack, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await submit(server, run, 1, 4)
        sampler = await saved_sampler(server, run, 5)
        before = await sample(server, sampler, 1)
        last = await submit(server, run, 5, 12, place=6)
        during = await sample(server, sampler, 2, seed=SHORT.seed)
        await server.result(run, last[-1])
        later = await saved_sampler(server, run, 14, number=1)
        assert await sample(server, sampler, 3) == before == during
        assert await sample(server, later, 1) != before


async def test_a_request_without_a_seed_gets_one_of_its_own(server: Stack, engine: Engine) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine):
        first = await sample(server, sampler, 1, seed=None)
        assert await sample(server, sampler, 2, seed=None) != first
        assert await sample(server, sampler, 3, seed=0) == await sample(server, sampler, 4, seed=0)


async def test_what_cannot_run_fails_with_a_reason_and_alone(server: Stack, engine: Engine) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine):
        too_long = await submit_sample(server, sampler, 1, prompt=(1,) * 5_000)
        fine = await submit_sample(server, sampler, 2)
        failure = await ended(server, sampler, too_long)
        assert failure.json()["category"] == "user"
        assert "5000" in failure.json()["error"].replace(",", "")
        await sampled(server, sampler, fine)


async def test_a_running_request_can_be_cancelled_and_its_neighbours_go_on(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, are_running = EngineDecoder.step, threading.Event()

    def step(decoder: EngineDecoder) -> StepResults:
        if len(decoder._groups) == 2:
            are_running.set()
        return decode(decoder)

    monkeypatch.setattr(EngineDecoder, "step", step)
    sampler = await base_sampler(server)
    with worker(server, engine):
        alone = await sample(server, sampler, 1, LONG, max_tokens=60)
        gone = await submit_sample(server, sampler, 2, LONG, max_tokens=2_000 - 39)
        stays = await submit_sample(server, sampler, 3, LONG, max_tokens=60)
        assert await asyncio.to_thread(are_running.wait, PATIENCE_S)
        await server.samples.cancel(sampler.tenant, gone)
        assert await ended(server, sampler, gone) == CANCELLED
        assert await sampled(server, sampler, stays) == alone


async def test_a_name_can_be_sampled_from_and_moves_to_newer_weights(server: Stack, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await submit(server, run, 1, 4)
        saved = await server.result(run, await submit_save(server, run, 5, name="best"))
        path = saved.json()["path"]
        assert path == f"tinker://{run.id}/sampler_weights/best"
        older = await named_sampler(server, run, path, number=0)
        before = await sample(server, older, 1)
        await submit(server, run, 5, 8, place=6)
        await server.result(run, await submit_save(server, run, 10, name="best"))
        newer = await named_sampler(server, run, path, number=1)
        assert await sample(server, newer, 1) != before
        assert await sample(server, older, 2) == before


@pytest.mark.parametrize("share", [variant(0.0), 0.5])
async def test_sampling_leaves_training_as_it_is(server: Stack, engine: Engine, share: float) -> None:
    sampler = await base_sampler(server, "b")
    alone, beside = [await server.create(name, name, LORA) for name in ("alone", "beside")]
    with worker(server, engine, sampling_share=share):
        requests = await submit(server, alone, 1, 12)
        await server.result(alone, requests[-1])
        busy = [await submit_sample(server, sampler, seq, LONG, seed=seq, max_tokens=100) for seq in range(8)]
        requests = await submit(server, beside, 1, 12)
        await server.result(beside, requests[-1])
        for request in busy:
            assert (await ended(server, sampler, request)).kind is ResultKind.SAMPLE
    assert engine.adapters.state(alone.id).weights.equal(engine.adapters.state(beside.id).weights)


async def test_tokens_are_told_as_they_come(server: Stack, engine: Engine) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine):
        async with TokenStream(server.futures._redis) as stream:
            await sample(server, sampler, 0)  # by now it listens
            with stream.follow(sample_id(sampler.id, 1)) as feed:
                response = await sample(server, sampler, 1, stream=True, num_samples=2)
                sequences = wire_pb2.SampleResponse.FromString(response).sequences
                expected = [np.frombuffer(each.tokens, "<i4").tolist() for each in sequences]
                complete = set[int]()
                async for event in feed:
                    told = slice(event.before, event.before + len(event.tokens))
                    assert list(event.tokens) == expected[event.sequence][told]
                    assert len(event.tokens) == len(event.logprobs)
                    if told.stop == len(expected[event.sequence]):
                        complete.add(event.sequence)
                    if len(complete) == len(expected):
                        break


async def test_what_sampling_did_is_counted(server: Stack, engine: Engine, redis: Any) -> None:
    sampler = await base_sampler(server)
    prompt = tuple(range(1, 101))
    with worker(server, engine):
        for seq in range(2):
            await sample(server, sampler, seq, prompt=prompt)
    counted = {name: float(value) for name, value in redis.hgetall(redis_keys.counters(POOL)).items()}
    assert counted[b"sample_requests"] == 2
    assert counted[b"sampled_tokens"] == 2 * 2 * 12
    assert counted[b"prompt_tokens"] == 2 * len(prompt)
    assert 0 < counted[b"cached_prompt_tokens"] <= len(prompt)


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

    def decoded(self: EngineDecoder) -> StepResults:
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
    server: Stack, small_steps: Engine, processor: Processor, share: float
) -> None:
    """The requests use 8 adapters, and memory holds 16."""
    with worker(server, small_steps, sampling_share=share, kv_cache_tokens=16 * 64) as loop:
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


async def test_a_tenant_with_many_requests_does_not_make_another_wait_for_them(server: Stack, engine: Engine) -> None:
    crowd, single = await base_sampler(server, "crowd"), await base_sampler(server, "single")
    many = [await submit_sample(server, crowd, seq, seed=seq) for seq in range(300)]
    one = await submit_sample(server, single, 0)
    with worker(server, engine):
        await ended(server, single, one)
        behind = server.futures.wait(crowd.tenant, many[-1], 0)
        assert not hasattr(await behind, "kind")
        await server.samples.cancel(crowd.tenant, many[-1])


async def test_a_sample_next_to_twenty_long_requests_ends_in_ten_steps(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count its steps from its claim by the worker; memory is full of the other tenant's sequences."""
    steps: list[list[str]] = []
    added_at: dict[str, int] = {}
    step, add = EngineDecoder.step, EngineDecoder.add

    def counted(self: EngineDecoder) -> StepResults:
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
    with worker(server, engine, kv_cache_tokens=16 * 64):
        await until(lambda: len(steps) >= 30)
        one = await submit_sample(server, light, 0, max_tokens=8)
        await ended(server, light, one)
        for seq in range(20):
            await server.samples.cancel(heavy.tenant, sample_id(heavy.id, seq))
    at = next(at for at, finished in enumerate(steps) if one in finished)
    assert at - added_at[one] < 8 + 2
