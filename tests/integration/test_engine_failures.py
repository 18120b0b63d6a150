"""Failures of an engine: a broken request, little memory, a lost device. Neighbours continue with the same numbers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.disk.stored_results import RUN_STOPPED
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.messages.ids import request_id
from cotrain_store.messages.ops import OpKind, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring.recent_activity import cycle_records
from cotrain_store.oplog.execution import CrashCounts
from cotrain_workers.checkpoints.files import CheckpointFiles, WrittenFiles
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.device import EXIT_CODE, DeviceLost
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput, Op
from cotrain_workers.recovery.crashes import MAX_CRASHES
from cotrain_workers.recovery.replay import Restored
from tests.support.bodies import sequences
from tests.support.deaths import Failpoint, Killed, deaths_until, dying_worker, live
from tests.support.draws import variant
from tests.support.processes import PATIENCE_S, environment_of, settings_of
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import submit_save
from tests.support.stack import POOL, Stack, make_worker, worker
from tests.support.waiting import until
from tests.warm import popen

CRASHED = {"error": "Internal error: this request could not be run.", "category": "server"}
POISON = {"error": "Request repeatedly crashed the worker; it was not applied.", "category": "server"}


@pytest.fixture
def breaks_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the engine raise whenever it is given one of these ops: before it runs, or half way."""
    cycle_as_before = Engine.cycle

    def arm(poison: Collection[tuple[str, int]], *, half_way: bool = False, deadly: bool = False) -> None:
        def cycle(self: Engine, ops: Sequence[Op]) -> Yielding[CycleOutput]:
            if any(op.id in poison for op in ops):
                if half_way:
                    yield from cycle_as_before(self, ops)
                raise Killed if deadly else RuntimeError("the device is on fire")
            return (yield from cycle_as_before(self, ops))

        monkeypatch.setattr(Engine, "cycle", cycle)

    return arm


async def two_runs(server: Stack, last: int) -> tuple[RunRecord, RunRecord]:
    guilty, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
    for run in (guilty, neighbour):
        await submit(server, run, 1, last)
    return guilty, neighbour


@pytest.mark.parametrize(
    ("poison", "half_way"),
    [
        ({3}, True),
        ({4}, False),
        ({1, 2}, True),
        ({1, 2, 3, 4}, False),
        *(variant(some, False) for some in ({1}, {3}, {1, 2}, {3, 4})),
        *(variant(some, True) for some in ({1}, {4}, {3, 4}, {1, 2, 3, 4})),
    ],
    ids=str,
)
async def test_what_breaks_the_engine_fails_alone(
    server: Stack, engine: Engine, breaks_at: Callable[..., None], poison: set[int], half_way: bool
) -> None:
    """Afterwards its run stands where it would without these requests, in memory and in its log."""
    expected, digest = await undisturbed(server, engine, last=4)
    harmless, _ = await two_runs(server, 0)
    clean = await server.create("c", "c", LORA)
    kept = [seq for seq in range(1, 5) if seq not in poison]

    breaks_at({(harmless.id, seq) for seq in poison}, half_way=half_way)
    with worker(server, engine, drains=False):
        requests = await submit(server, harmless, 1, 4)
        neighbour = await submit(server, clean, 1, 4)
        answers = await results(server, harmless, requests)
        assert await results(server, clean, neighbour) == expected
    assert engine.adapters.state(clean.id).digest() == digest
    assert [answers[seq - 1] == CRASHED for seq in range(1, 5)] == [s in poison for s in range(1, 5)]
    reference = await played_alone(server, engine, kept)
    assert engine.adapters.state(harmless.id).digest() == reference

    breaks_at(set())  # a replay would now find nothing wrong with them
    assert restored_digest(server, engine, harmless.id) == reference


async def played_alone(server: Stack, engine: Engine, seqs: Sequence[int]) -> str:
    """Play some requests of the program, in places of their own; return the digest of the state."""
    run = await server.create("alone", "alone", LORA)
    with worker(server, engine):
        for place, seq in enumerate(seqs, 1):
            requests = await submit(server, run, seq, seq, place=place)
            await results(server, run, requests)
        await server.result(run, request_id(run.id, 0))
    return engine.adapters.state(run.id).digest()


async def test_a_cycle_that_broke_is_told_in_its_record(
    server: Stack, engine: Engine, breaks_at: Callable[..., None], redis: Any
) -> None:
    guilty, neighbour = await two_runs(server, 4)
    breaks_at({(guilty.id, 3)})
    with worker(server, engine):
        for run in (guilty, neighbour):
            await server.result(run, request_id(run.id, 4))
    rows = await cycle_records(server.futures._redis, POOL, 10)
    broken = [row for row in rows if row["outcome"] == "isolated"]
    assert len(broken) == 1
    failed = {row["run"]: row["failed"] for row in broken[0]["runs"]}
    assert failed == {guilty.id: 1, neighbour.id: 0}
    assert redis.hget(redis_keys.counters(POOL), "failed_ops") == b"1"


async def test_a_run_that_cannot_be_restored_among_the_suspects_stops_alone(
    server: Stack, engine: Engine, breaks_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, digest = await undisturbed(server, engine, last=4)
    guilty, neighbour = await two_runs(server, 4)
    with worker(server, engine) as loop:
        breaks_at({(guilty.id, 1)})
        ensure_as_before, calls = loop._runs.ensure, 0

        def ensure(run: Any) -> Yielding[Restored | None]:
            nonlocal calls
            calls += run == guilty.id
            if run == guilty.id and calls > 1:
                raise SpoolCorrupt("gone")
            return (yield from ensure_as_before(run))

        loop._runs.ensure = ensure  # type: ignore[method-assign]  # one that raises
        for seq in range(1, 5):
            assert await server.result(guilty, request_id(guilty.id, seq)) == RUN_STOPPED
        answers = [request_id(neighbour.id, seq) for seq in range(1, 5)]
        assert await results(server, neighbour, answers) == expected
    assert engine.adapters.state(neighbour.id).digest() == digest


async def test_a_request_that_kills_every_process_fails_alone_in_the_end(
    server: Stack, engine: Engine, breaks_at: Callable[..., None], redis: Any
) -> None:
    expected, digest = await undisturbed(server, engine, last=4)
    guilty, neighbour = await two_runs(server, 4)
    breaks_at({(guilty.id, 2), (neighbour.id, 99)}, deadly=True)
    answers = asyncio.gather(
        *(results(server, run, [request_id(run.id, seq) for seq in range(1, 5)]) for run in (guilty, neighbour))
    )
    deaths = await deaths_until(answers, server, engine)
    mine, others = await answers
    assert [answer == POISON for answer in mine] == [False, True, False, False]
    assert others == expected
    assert engine.adapters.state(neighbour.id).digest() == digest
    assert deaths <= 8
    assert restored_digest(server, engine, guilty.id) == engine.adapters.state(guilty.id).digest()
    assert not redis.exists(redis_keys.starts(POOL), redis_keys.crash_counts(POOL))


async def test_kills_from_outside_are_not_blamed_on_a_request(server: Stack, engine: Engine) -> None:
    expected, digest = await undisturbed(server, engine, last=4)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 4)
    for failpoint in ("commit", "commit", "commit", "crash_counts.survived", "crash_counts.survived", "commit"):
        async with dying_worker(server, engine, Failpoint(failpoint)):
            pass
    with worker(server, engine):
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest


async def test_no_write_runs_beside_a_part_that_may_kill(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a save or a copy killed would be counted against the request beside it."""
    writing: list[object] = []
    beside: list[int] = []
    write, note = CheckpointFiles.write, CrashCounts.risk

    def slow_write(files: CheckpointFiles, *args: Any) -> WrittenFiles:
        writing.append(files)
        time.sleep(0.3)
        try:
            return write(files, *args)
        finally:
            writing.remove(files)

    def noting(deaths: CrashCounts, part: str) -> None:
        beside.append(len(writing))
        note(deaths, part)

    monkeypatch.setattr(CheckpointFiles, "write", slow_write)
    monkeypatch.setattr(CrashCounts, "risk", noting)
    saved, run = [await server.create(name, name, LORA) for name in ("a", "b")]
    await submit(server, saved, 1, 2)
    await submit_save(server, saved, 3, number=0)
    async with dying_worker(server, engine, Failpoint("mark_stored", of_weights=True)):
        pass
    requests = await submit(server, run, 1, 4)
    for _ in range(MAX_CRASHES):
        async with dying_worker(server, engine, Failpoint("commit")):
            pass
        await until(lambda: not writing)
    with worker(server, engine):
        await results(server, run, requests)
    assert beside
    assert not any(beside)


async def test_a_worker_whose_device_is_lost_ends_and_leaves_the_step_to_the_next(
    server: Stack, engine: Engine, breaks_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is blamed for an error after which nothing can be computed any more."""
    expected, digest = await undisturbed(server, engine, last=4)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 4)
    breaks_at({(run.id, 3)})
    with monkeypatch.context() as lost:

        def check_device(_: Engine) -> None:
            raise DeviceLost("an illegal memory access was encountered")

        lost.setattr(Engine, "check_device", check_device)
        loop, opened = make_worker(server, engine)
        with pytest.raises(DeviceLost):
            await asyncio.to_thread(live, loop, opened)
    breaks_at(set())
    with worker(server, engine):
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest


#: The real process, but for its model, and with a loop that meets a sticky error of the device.
WORKER = """
import atexit
from unittest.mock import Mock
import cotrain_workers.__main__ as worker
from cotrain_workers.worker import bootstrap
from cotrain_workers.engine.device import DeviceLost

atexit.register(print, "an orderly end")
lost = Mock(run=Mock(side_effect=DeviceLost("CUDA error: device-side assert triggered")))
bootstrap.Engine = Mock()
bootstrap.measure_throughput = lambda *_: 1.0
worker.publish_tokenizer = lambda *_, **__: None
worker.pool_record = Mock()
worker.enter_pool = lambda *_: lost
worker.main()
"""


def test_a_lost_device_ends_the_process_with_its_own_status(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    settings = settings_of(empty_redis.url, tmp_path, tmp_path / "no-model")
    ended = popen.run([sys.executable, "-c", WORKER], env=environment_of(settings), timeout=PATIENCE_S)
    said = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_CODE == 70, said
    assert "device_lost" in said
    assert "device-side assert" in said
    assert "an orderly end" not in said
    assert "Traceback" not in said


LimitRows = Callable[[int], None]


@pytest.fixture
def limit_rows(engine: Engine) -> Iterator[LimitRows]:
    """Make longer rows exceed the memory of the base model, until the end of the test."""
    most, before = [1 << 30], engine.safe_tokens

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > most[0]:
            raise torch.OutOfMemoryError

    def limit(rows: int) -> None:
        most[0] = rows

    hook = engine._base.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
    yield limit
    hook.remove()
    engine._forward_backward.limits.tokens = before


async def test_a_run_split_for_lack_of_memory_resumes_with_more_memory(
    server: Stack, engine: Engine, redis: Any, limit_rows: LimitRows
) -> None:
    """Its last bits differ there, which is no reason to stop the run."""
    run = await server.create("a", "a", LORA)
    limit_rows(128)
    with worker(server, engine, drains=False) as loop:
        found = await server.result(run, await server.forward_backward(run, 1, sequences(1, 5, 70)))
        assert found.kind is ResultKind.PASS
        await server.result(run, await server.optim_step(run, 2))
        assert loop._heartbeat._describe().safe_tokens <= 128
    assert redis.hget(redis_keys.log(POOL, run.id), "numerics") == b"mixed"
    limit_rows(1 << 30)
    engine.adapters.drop(run.id)
    with worker(server, engine):
        answer = await server.result(run, await server.optim_step(run, 3))
        assert "grad_norm" in answer.json()["metrics"]


async def test_a_request_that_exceeds_memory_fails_alone_also_in_a_replay(
    server: Stack, engine: Engine, limit_rows: LimitRows
) -> None:
    expected, digest = await undisturbed(server, engine, last=4)
    run = await server.create("a", "a", LORA)
    limit_rows(64)
    with worker(server, engine, drains=False):
        requests = await submit(server, run, 1, 3)
        large = await server.forward_backward(run, 4, sequences(1, 1, 100), OpKind.FORWARD_BACKWARD)
        requests += await submit(server, run, 4, 4, place=5)
        failure = (await server.result(run, large)).json()
        assert failure["error"].startswith("Request needs more memory than the worker has (")
        assert failure["category"] == "server"
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest
    limit_rows(1 << 30)
    assert restored_digest(server, engine, run.id) == digest
