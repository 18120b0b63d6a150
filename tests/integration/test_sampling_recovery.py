"""Kills next to sampling, of a worker or of Redis: saved weights and accepted requests survive, with the same numbers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, request_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord, SamplerRecord
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.results.completions import Completions
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import StepResults
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.spec import seed_of
from cotrain_workers.recovery.crashes import CRASHED, MAX_CRASHES, POISON
from tests.support.deaths import Failpoint, Killed, deaths_until, dying_worker, live
from tests.support.draws import variant
from tests.support.program import LORA, submit
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import BODY, LARGE_BODY, Samples, open_samples
from tests.support.sampling import LONG, base_sampler, ended, sample, sampled, saved_sampler, submit_sample, submit_save
from tests.support.stack import POOL, Stack, make_worker, snapshots, worker
from tests.support.waiting import PATIENCE_S, until


async def train_and_save(server: Stack, run: RunRecord) -> None:
    """Two steps with a save after each, and a gradient that waits."""
    await submit(server, run, 1, 4)
    await submit_save(server, run, 5, number=0)
    await submit(server, run, 5, 8, place=6)
    await submit_save(server, run, 10, number=1)
    await submit(server, run, 9, 9, place=11)


async def undisturbed_samples(server: Stack, engine: Engine) -> tuple[bytes, bytes]:
    """Return a sample of each save of an undisturbed run, computed once by each engine."""
    if engine not in _UNDISTURBED:
        run = await server.create("undisturbed", "undisturbed", LORA)
        with worker(server, engine):
            await train_and_save(server, run)
            _UNDISTURBED[engine] = await samples_of(server, run)
    return _UNDISTURBED[engine]


async def samples_of(server: Stack, run: RunRecord) -> tuple[bytes, bytes]:
    """Wait for the saves of a run, and sample from each."""
    samples = []
    for number, seq in enumerate((5, 10)):
        await server.result(run, request_id(run.id, seq))
        sampler = await server.records.sampler(run.tenant, f"{run.session}:sample:{number}")
        samples.append(await sample(server, sampler, 1))
    return samples[0], samples[1]


_UNDISTURBED: WeakKeyDictionary[Engine, tuple[bytes, bytes]] = WeakKeyDictionary()

FAILPOINTS = [
    variant(Failpoint("commit", 1)),
    variant(Failpoint("commit", 1, after=True)),
    Failpoint("commit", 2, after=True),
    Failpoint("mark_stored", of_weights=True),
    variant(Failpoint("mark_stored", after=True, of_weights=True)),
    variant(Failpoint("mark_stored", 2, of_weights=True)),
    Failpoint("register_snapshot", 1, after=True),
]


@pytest.mark.parametrize("failpoint", FAILPOINTS, ids=str)
async def test_saved_weights_survive_a_worker_killed_anywhere(
    server: Stack, engine: Engine, failpoint: Failpoint
) -> None:
    expected = await undisturbed_samples(server, engine)
    run = await server.create("a", "a", LORA)
    await train_and_save(server, run)
    async with dying_worker(server, engine, failpoint, tuning=snapshots(ops=1)):
        pass
    with worker(server, engine, tuning=snapshots(ops=1)):
        assert await samples_of(server, run) == expected
    assert expected[0] != expected[1]


async def test_weights_whose_file_was_never_written_are_made_again(
    server: Stack, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sampled from memory before, from a replay after, and no log is cut in between."""
    run = await server.create("a", "a", LORA)
    blocked = threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr("cotrain_workers.checkpoints.files.write_folder", lambda *_: blocked.wait(PATIENCE_S))
        loop, opened = make_worker(server, engine, tuning=snapshots(ops=1))
        life = asyncio.create_task(asyncio.to_thread(live, loop, opened))
        await train_and_save(server, run)
        await server.result(run, request_id(run.id, 11))
        sampler = await server.records.sampler(run.tenant, "a:sample:0")
        before = await sample(server, sampler, 1)
        position = loop._execution.logs.position(run.id)
        assert position is not None
        assert position.snap < 5
        Failpoint("open_steps").arm(loop)
        assert not await life
    assert not list((tmp_path / "weights").glob("??/*"))
    loop._weights._writer.shutdown(wait=False, cancel_futures=True)
    blocked.set()  # its writer ends with it
    engine.adapters.drop(run.id)
    with worker(server, engine, tuning=snapshots(ops=1)) as loop:
        assert await sample(server, sampler, 2) == before
        await until(lambda: not loop._weights._unstored)
        await submit(server, run, 10, 12, place=12)
        await server.result(run, request_id(run.id, 14))
    assert len(list((tmp_path / "weights").glob("??/*"))) == 2


async def test_a_closed_run_is_not_forgotten_before_its_weights_are_on_disk(
    server: Stack, engine: Engine, redis: Any
) -> None:
    run = await server.create("a", "a", LORA)
    await train_and_save(server, run)
    async with dying_worker(server, engine, Failpoint("mark_stored", of_weights=True)):
        pass
    await server.intake.close_run(run)
    engine.adapters.drop(run.id)
    with worker(server, engine):
        sampler = await server.records.sampler(run.tenant, "a:sample:0")
        await sample(server, sampler, 1)
        await until(lambda: not redis.exists(redis_keys.ops(POOL, run.id)))
    with worker(server, engine):
        assert await sample(server, sampler, 2) == await sample(server, sampler, 3)


async def test_a_disk_that_is_full_delays_the_file_and_loses_nothing(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RETRY_S", 0.01)
    run = await server.create("a", "a", LORA)
    with worker(server, engine) as loop:
        with monkeypatch.context() as broken:
            broken.setattr("cotrain_workers.checkpoints.files.write_folder", full)
            await submit(server, run, 1, 4)
            sampler = await saved_sampler(server, run, 5)
            before = await sample(server, sampler, 1)
        await until(lambda: not loop._weights._unstored)
    with worker(server, engine):
        assert await sample(server, sampler, 2) == before


async def test_a_request_killed_in_the_middle_gives_the_same_tokens_after(server: Stack, engine: Engine) -> None:
    sampler = await base_sampler(server)
    body = replace(LONG, max_tokens=60)
    with worker(server, engine):
        expected = await sample(server, sampler, 1, body)
    seeded = await submit_sample(server, sampler, 2, body)
    unseeded = await submit_sample(server, sampler, 3, body, seed=None)
    async with dying_worker(server, engine, Failpoint("open_steps", 20)) as loop:
        await until(lambda: loop._sampler.running == 2)
    with worker(server, engine):
        assert await sampled(server, sampler, seeded) == expected
        again = await sample(server, sampler, 4, body, seed=seed_of(unseeded))
        assert await sampled(server, sampler, unseeded) == again


async def test_a_drained_worker_gives_back_what_it_has_not_finished(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await base_sampler(server)
    requests = [await submit_sample(server, sampler, seq, LONG) for seq in range(3)]
    loop, opened = make_worker(server, engine)
    with monkeypatch.context() as patch:

        def step(decoder: EngineDecoder) -> StepResults:
            progress = decode(decoder)
            if loop._sampler.running == 3:
                loop.stop()
            return progress

        decode = EngineDecoder.step
        patch.setattr(EngineDecoder, "step", step)
        assert await asyncio.to_thread(live, loop, opened)
    assert loop._sampler.running == 3
    assert redis.llen(redis_keys.claimed_samples(POOL, loop._execution.worker)) == 0
    with worker(server, engine):
        assert len({await sampled(server, sampler, request) for request in requests}) == 1


@pytest.fixture
def breaks_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a decoder's step raise, or kill, while it holds a certain request."""
    step_as_before = EngineDecoder.step

    def arm(request: str, *, deadly: bool = False) -> None:
        def step(self: EngineDecoder) -> StepResults:
            if request in self._groups:
                raise Killed if deadly else RuntimeError("the device is on fire")
            return step_as_before(self)

        monkeypatch.setattr(EngineDecoder, "step", step)

    return arm


async def test_a_request_that_breaks_the_decoder_fails_alone(
    server: Stack, engine: Engine, breaks_for: Callable[..., None]
) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine):
        expected = await sample(server, sampler, 0)
        breaks_for(f"{sampler.id}:3")
        requests = [await submit_sample(server, sampler, seq) for seq in range(1, 6)]
        for request in requests:
            if request.endswith(":3"):
                failure = await ended(server, sampler, request)
                assert failure.json() == {"error": CRASHED.message, "category": CRASHED.category}
            else:
                assert await sampled(server, sampler, request) == expected


async def test_a_request_that_kills_every_process_fails_alone_in_the_end(
    server: Stack, engine: Engine, breaks_for: Callable[..., None]
) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine):
        expected = await sample(server, sampler, 0)
    requests = [await submit_sample(server, sampler, seq) for seq in range(1, 4)]
    breaks_for(requests[1], deadly=True)
    answers = asyncio.gather(*(ended(server, sampler, request) for request in requests))
    deaths = await deaths_until(answers, server, engine)
    assert (await answers)[1].json()["error"] == POISON.message
    for request in (requests[0], requests[2]):
        assert await sampled(server, sampler, request) == expected
    assert deaths <= 2 * MAX_CRASHES


REQUESTS = 120
KILLS_PATIENCE_S = 300.0


def work(samples: Samples, stop: threading.Event) -> None:
    """Claim and resolve like a worker: claimed requests are kept until their results are stored."""
    while not stop.is_set():
        try:
            claimed = samples.sampling.claim(5)
        except CONNECTION_LOST:
            continue
        results = {one.request: Result(ResultKind.SAMPLE, one.request.encode()) for one in claimed}
        while results and not stop.is_set():
            try:
                samples.sampling.resolve(results, {"sample_requests": len(results)})
                break
            except CONNECTION_LOST:
                pass
        if not claimed:
            stop.wait(0.01)


async def accepted(samples: Samples, sampler: SamplerRecord, seq: int) -> RequestId:
    while True:
        try:
            body = LARGE_BODY if seq % 5 == 0 else BODY
            return await samples.intake.submit(sampler, seq, body)
        except CONNECTION_LOST:
            await asyncio.sleep(0.02)


async def told(completions: Completions, sampler: SamplerRecord, count: int) -> list[RequestId]:
    found: list[RequestId] = []
    cursor = 0
    while len(found) < count:
        ended, cursor = await completions.wait(sampler, 0, cursor, 1.0)
        found += [one.request for one in ended]
    return found


async def test_every_request_ends_and_is_published_once_across_kills_of_redis(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with (
            open_samples(server.url, tmp_path) as samples,
            samples.completions() as completions,
            asyncio.timeout(KILLS_PATIENCE_S),
        ):
            samplers = [await samples.sampler(tenant) for tenant in ("a", "b")]
            stop = threading.Event()
            worker = threading.Thread(target=work, args=(samples, stop))
            worker.start()
            try:
                submits = [
                    asyncio.create_task(accepted(samples, sampler, seq))
                    for seq in range(REQUESTS)
                    for sampler in samplers
                ]
                polls = [asyncio.create_task(told(completions, sampler, REQUESTS)) for sampler in samplers]
                for _ in range(3):
                    await asyncio.sleep(0.05)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.restart)
                requests = await asyncio.gather(*submits)
                ends = [request for poll in polls for request in await poll]
            finally:
                stop.set()
                worker.join()
            assert sorted(ends) == sorted(requests)
            assert all(samples.result(request) == Result(ResultKind.SAMPLE, request.encode()) for request in requests)
            assert (samples.load("a"), samples.load("b")) == ((0, 0, 0), (0, 0, 0))
            assert samples.log.references() == {}
            assert float(samples.log.redis.hget(redis_keys.counters(POOL), "sample_requests")) == len(requests)
