"""Runs of a worker in memory and on disk, and their eviction."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool, SpoolRef
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import WorkerId
from cotrain_store.messages.ops import OpKind
from cotrain_workers.checkpoints.state_files import write_snapshot
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery import recovery_copies
from cotrain_workers.worker.loop import MARGIN_S
from tests.support.bodies import sequences
from tests.support.program import LORA, PROGRAM, restored_digest, results, snapshot_files, submit, undisturbed
from tests.support.stack import POOL, Stack, snapshots, worker
from tests.support.waiting import PATIENCE_S, files_below, until


async def test_runs_that_take_turns_on_the_device_train_as_if_there_was_room(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, digest = await undisturbed(server, engine)
    monkeypatch.setattr(engine.adapters, "_adapter_bytes", 1)
    prefetched: list[str] = []
    monkeypatch.setattr(engine.adapters, "prefetch", prefetched.extend)
    runs = [await server.create(tenant, tenant, LORA) for tenant in ("a", "b")]
    answers: dict[str, list[Any]] = {run.id: [] for run in runs}
    with worker(server, engine) as loop:
        for seq in range(1, len(PROGRAM) + 1):
            for run in runs:
                answers[run.id] += await results(server, run, await submit(server, run, seq, seq))
        beat = loop._heartbeat._describe()
    assert beat.runs == 2
    assert beat.parked_runs == engine.adapters.offloaded >= 1
    assert set(prefetched) == {run.id for run in runs}
    for run in runs:
        assert answers[run.id] == expected
        assert restored_digest(server, engine, run.id) == digest


async def test_a_run_over_the_host_budget_leaves_memory_and_comes_back_the_same(
    server: Stack, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    answers = []
    monkeypatch.setattr(engine.adapters, "_host_bytes", 1)
    with worker(server, engine) as loop:
        for seq in range(1, len(PROGRAM) + 1):
            answers += await results(server, run, await submit(server, run, seq, seq))
            if seq % 4 == 1:
                await until(lambda: loop._runs.resident == 0)
                assert run.id not in engine.adapters
                assert snapshot_files(loop._execution._redis, run, tmp_path)
    assert answers == expected
    assert restored_digest(server, engine, run.id) == digest


async def test_a_run_rests_and_leaves_memory_while_the_host_s_time_is_set_back(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = itertools.count(time.time(), -60)
    clocks = SimpleNamespace(time=lambda: next(earlier), monotonic=time.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(recovery_copies, "time", clocks)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(idle_s=1e-6, evict_idle_s=1e-6)) as loop:
        await results(server, run, await submit(server, run, 1, 1))
        await until(lambda: loop._runs.resident == 0)


async def test_a_run_that_rests_leaves_memory_and_comes_back_the_same(server: Stack, engine: Engine) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    answers = []
    with worker(server, engine, tuning=snapshots(idle_s=1e-6, evict_idle_s=1e-6)) as loop:
        for seq in range(1, len(PROGRAM) + 1):
            answers += await results(server, run, await submit(server, run, seq, seq))
            if seq % 4 == 1:
                await until(lambda: loop._runs.resident == 0)
                assert run.id not in engine.adapters
    assert answers == expected
    assert restored_digest(server, engine, run.id) == digest


async def test_a_long_log_is_cut_and_two_copies_are_kept(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    with worker(server, engine, tuning=snapshots(ops=2)):
        run = await server.create("a", "a", LORA)
        for seq in range(1, len(PROGRAM) + 1):
            await results(server, run, await submit(server, run, seq, seq))
    cut, done = (int(each) for each in redis.hmget(redis_keys.log(POOL, run.id), ["oldsnap", "done"]))
    assert 0 < cut < done == len(PROGRAM)
    assert redis.hlen(redis_keys.ops(POOL, run.id)) == done - cut
    kept = snapshot_files(redis, run, tmp_path)
    assert len(kept) == 2
    assert sorted(kept[0].parent.iterdir()) == sorted(kept)


async def test_a_run_that_only_evaluates_does_not_keep_a_line_for_every_forward(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_workers.recovery.recovery_copies.LOG_ENTRIES", 4)
    with worker(server, engine):
        run = await server.create("a", "a", LORA)
        for seq in range(1, 20):
            data = sequences(seq, 1, 5)
            await server.result(run, await server.forward_backward(run, seq, data, OpKind.FORWARD))
            assert redis.hlen(redis_keys.ops(POOL, run.id)) <= 3 * 4
        await until(lambda: int(redis.hget(redis_keys.log(POOL, run.id), "snap")) > 10)


async def test_a_closed_run_leaves_nothing_on_disk_or_in_memory(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    with worker(server, engine, tuning=snapshots(ops=1)) as loop:
        run = await server.create("a", "a", LORA)
        await results(server, run, await submit(server, run, 1, 4))
        large = sequences(0, 4, 1500)
        await server.result(run, await server.forward_backward(run, 5, large))
        assert int(redis.hvals(redis_keys.spool_segment_refs())[0]) == 1
        await server.intake.close_run(run)
        await until(lambda: not redis.exists(redis_keys.ops(POOL, run.id)) and loop._runs.resident == 0)
        await until(lambda: not files_below(tmp_path / "snapshots", ".safetensors"))
    assert run.id not in engine.adapters
    assert redis.hlen(redis_keys.spool_segment_refs()) == 0
    assert redis.smembers(redis_keys.drops(POOL, loop._execution.worker)) == set()


async def test_a_segment_that_no_process_holds_and_nothing_needs_is_removed(
    server: Stack, tmp_path: Path, engine: Engine
) -> None:
    run = await server.create("a", "a", LORA)
    long = sequences(0, 4, 1500)
    assert INLINE_LIMIT_BYTES < 4 * 1500 * 4
    request = await server.forward_backward(run, 1, long)
    (needed,) = (tmp_path / "spool").iterdir()
    orphan = tmp_path / "spool" / "api-orphan"
    orphan.write_bytes(b"x")
    holder = Spool(tmp_path / "spool", "holder")
    held = tmp_path / "spool" / SpoolRef.parse(holder.put(b"x").result()).segment
    with worker(server, engine, orphan_age_s=0.05):
        await server.result(run, request)
        await until(lambda: not orphan.exists())
        assert held.exists()
        holder.close()
        await until(lambda: not held.exists())
    assert needed.exists()


async def test_files_that_look_old_and_are_not_wanted_yet_stay(server: Stack, tmp_path: Path, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    young = [tmp_path / "spool" / "api-orphan", tmp_path / "snapshots" / "ab" / ".1-gone-1.safetensors.0f"]
    for path in young:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    with worker(server, engine) as loop:
        await results(server, run, await submit(server, run, 1, 4))
        assert not loop._runs._sweep._segments.is_empty
        assert not loop._runs._sweep._copies.is_empty
    assert all(path.exists() for path in young)


async def test_a_copy_stays_while_its_worker_may_register_it(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    folder = tmp_path / "snapshots" / "ab"
    folder.mkdir(parents=True)
    living, dead = (folder / f".1-w9-{epoch}.safetensors.0f" for epoch in (3, 2))
    for path in (living, dead):
        path.write_bytes(b"x")
    redis.sadd(redis_keys.workers(POOL), "w9")
    beat = WorkerHeartbeat(WorkerId("w9"), 3, "idle", "cpu", 1.0, runs=9, memory_bytes=0, seen_at=0.0)
    redis.set(redis_keys.worker(POOL, WorkerId("w9")), json.dumps(asdict(beat)))
    with worker(server, engine, orphan_age_s=0):
        # Before, w9 would be the only one that the run could go to.
        await until(lambda: redis.exists(redis_keys.worker(POOL, WorkerId("w0"))))
        run = await server.create("a", "a", LORA)
        await results(server, run, await submit(server, run, 1, 4))
        await until(lambda: not dead.exists())
    assert living.exists()


async def test_a_copy_that_cannot_be_written_is_tried_again(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with worker(server, engine, tuning=snapshots(ops=1)):
        with monkeypatch.context() as broken:
            broken.setattr("cotrain_workers.recovery.recovery_copies.write_snapshot", full)
            run = await server.create("a", "a", LORA)
            await results(server, run, await submit(server, run, 1, 2))
        await results(server, run, await submit(server, run, 3, 3))
        await until(lambda: redis.hget(redis_keys.log(POOL, run.id), "snap") == b"3")


async def test_a_drain_gives_up_at_its_deadline_and_the_rest_is_replayed(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await undisturbed(server, engine, last=4)
    released = threading.Event()

    def slow(*args: Any) -> Any:
        released.wait(PATIENCE_S)
        return write_snapshot(*args)

    monkeypatch.setattr("cotrain_workers.recovery.recovery_copies.write_snapshot", slow)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, stop_grace_s=MARGIN_S + 0.05):
        answers = await results(server, run, await submit(server, run, 1, 3))
    assert redis.hget(redis_keys.log(POOL, run.id), "snap") == b"-1"
    released.set()
    with worker(server, engine):
        answers += await results(server, run, await submit(server, run, 4, 4))
    assert answers == expected
