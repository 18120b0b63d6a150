"""Whatever dies, and whenever: every run goes on with the same numbers, or stops alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, RunId, request_id
from cotrain_store.messages.ops import OpKind, Result
from cotrain_workers.checkpoints.state_files import Snapshot, write_snapshot
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.worker.loop import WorkerLoop
from tests.support.bodies import pass_body, sequences
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import (
    LORA,
    PROGRAM,
    UNDISTURBED,
    killed_after,
    restored_digest,
    results,
    snapshot_files,
    submit,
    train_undisturbed,
    undisturbed,
)
from tests.support.stack import POOL, Stack, snapshots, worker
from tests.support.waiting import PATIENCE_S, until

FAILPOINTS = [
    variant(Failpoint("open_steps", 2)),
    variant(Failpoint("bodies", 1)),
    Failpoint("bodies", 3),
    Failpoint("commit", 1),
    variant(Failpoint("commit", 1, after=True)),
    variant(Failpoint("commit", 3)),
    Failpoint("commit", 3, after=True),
    variant(Failpoint("register_snapshot", 1)),
    variant(Failpoint("register_snapshot", 1, after=True)),
    Failpoint("register_snapshot", 2),
]


def replayed(loop: WorkerLoop, run: RunId) -> int:
    """Restore a run in the engine of a worker. Return the number of ops that were replayed."""
    restored = run_to_end(loop._runs.ensure(run))
    return restored.replayed if restored else 0


@pytest.mark.parametrize("failpoint", FAILPOINTS, ids=str)
async def test_a_worker_killed_anywhere_leaves_no_trace_in_the_numbers(
    server: Stack, engine: Engine, failpoint: Failpoint
) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, len(PROGRAM))
    async with dying_worker(server, engine, failpoint, tuning=snapshots(ops=2)):
        pass
    with worker(server, engine, tuning=snapshots(ops=2)):
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest


@pytest.mark.parametrize("debt_ops", [1, 1000])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_gradient_that_waits_for_its_step_survives(
    server: Stack, engine: Engine, is_killed: bool, debt_ops: int
) -> None:
    """From its log after a kill, from its recovery copy after a drain or an early copy."""
    expected, digest = await undisturbed(server, engine, last=4)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 3)
    if is_killed:
        after_commit = Failpoint("commit", 1, after=True)
        async with dying_worker(server, engine, after_commit, tuning=snapshots(ops=debt_ops)):
            pass
    else:
        with worker(server, engine, tuning=snapshots(ops=debt_ops)):
            await results(server, run, requests)
    engine.adapters.drop(run.id)
    requests += await submit(server, run, 4, 4)
    with worker(server, engine):
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest


async def test_a_drained_worker_leaves_nothing_to_replay(server: Stack, engine: Engine, redis: Any) -> None:
    _, digest = await train_undisturbed(server, engine)
    run = UNDISTURBED
    engine.adapters.drop(run)
    with worker(server, engine) as loop:
        assert replayed(loop, run) == 0
    assert engine.adapters.state(run).digest() == digest


async def test_a_drain_copies_a_run_that_changed_while_its_last_copy_was_written(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1)) as loop:

        def slow(*args: Any) -> Snapshot:
            assert loop._stopping.wait(PATIENCE_S)
            return write_snapshot(*args)

        monkeypatch.setattr("cotrain_workers.recovery.recovery_copies.write_snapshot", slow)
        for first, last in ((1, 4), (5, 5)):
            await results(server, run, await submit(server, run, first, last))
    assert redis.hget(redis_keys.log(POOL, run.id), "snap") == b"5"


@pytest.mark.parametrize(
    ("damage", "copies"),
    [
        ("cut", 2),
        ("flipped", 1),
        ("gone", 1),
        ("another run's", 2),
        *map(variant, ("cut", "flipped", "gone", "another run's"), (1, 2, 2, 1)),
    ],
)
async def test_a_newest_copy_that_cannot_be_read_costs_a_longer_replay_and_nothing_else(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any, damage: str, copies: int
) -> None:
    """From its predecessor, or from the beginning of the run; then there is a good copy again."""
    expected, digest = await train_undisturbed(server, engine, last=8)
    run = await server.create("a", "a", LORA)
    answers = []
    for first, last in ((1, 4), (5, 6))[:copies]:
        with worker(server, engine):
            answers += await results(server, run, await submit(server, run, first, last))
    newest, *_ = snapshot_files(redis, run, tmp_path)
    content = newest.read_bytes()
    match damage:
        case "cut":
            newest.write_bytes(content[:-1])
        case "flipped":
            newest.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "gone":
            newest.unlink()
        case "another run's":
            name = redis.hget(redis_keys.log(POOL, UNDISTURBED), "snapfile")
            other = tmp_path / "snapshots" / name.decode()
            newest.write_bytes(other.read_bytes())
    with worker(server, engine):
        answers += await results(server, run, await submit(server, run, len(answers) + 1, 8))
    assert answers == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert restored_digest(server, engine, run.id) == digest


async def test_a_copy_that_was_lost_is_written_again_at_once(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await results(server, run, await submit(server, run, 1, 4))
    lost, *_ = snapshot_files(redis, run, tmp_path)
    lost.unlink()
    with worker(server, engine, drains=False):
        data = sequences(5, 1, 9)
        await server.result(run, await server.forward_backward(run, 5, data, OpKind.FORWARD))
        await until(lambda: snapshot_files(redis, run, tmp_path)[0] != lost)
    assert snapshot_files(redis, run, tmp_path)[0].exists()


async def test_a_log_that_other_numerics_wrote_is_replayed_within_a_tolerance_and_copied_out(
    server: Stack, engine: Engine, redis: Any
) -> None:
    """Another CPU or another torch moves the last bits; that is no reason to stop a run."""
    run, _ = await killed_after(server, engine, last=4)
    redis.hset(redis_keys.log(POOL, run.id), "numerics", "another-machine")
    name = redis_keys.result(request_id(run.id, 4))
    stored = Result.decode(redis.get(name)).json()
    stored["metrics"]["grad_norm"] *= 1 + 1e-6
    redis.set(name, Result.of_json(stored).encode())
    with worker(server, engine):
        answers = await results(server, run, await submit(server, run, 5, 5))
        assert isinstance(answers[0], bytes)
    assert redis.hmget(redis_keys.log(POOL, run.id), ["snap", "numerics"]) == [b"5", None]


async def test_a_replay_does_without_results_that_have_expired(server: Stack, engine: Engine, redis: Any) -> None:
    _, digest = await undisturbed(server, engine, last=4)
    run, _ = await killed_after(server, engine, last=3)
    for seq in range(4):
        redis.delete(redis_keys.result(request_id(run.id, seq)))
    with worker(server, engine):
        await results(server, run, await submit(server, run, 4, 4))
    assert engine.adapters.state(run.id).digest() == digest
    assert float(redis.hget(redis_keys.counters(POOL), "replayed_ops")) > 0


async def test_a_request_that_is_not_a_number_fails_again_in_a_replay_and_leaves_nothing(
    server: Stack, engine: Engine
) -> None:
    run, clean = [await server.create(name, name, LORA) for name in ("a", "b")]
    poison = pass_body(run.id, 2, sequences(5, 1, 9), weight=math.nan)
    last: list[RequestId] = []
    with worker(server, engine, drains=False):
        await submit(server, run, 1, 1)
        bad = await server.intake.submit(run, 2, OpKind.FORWARD_BACKWARD, poison, 9, "2")
        await submit(server, clean, 1, 2)
        failure = await server.result(run, bad)
        assert failure.json()["category"] == "user"
        await server.result(clean, request_id(clean.id, 2))
    with worker(server, engine):
        for each in (run, clean):
            last = await submit(server, each, 3, 4)
            assert "metrics" in (await results(server, each, last))[1]
    assert engine.adapters.state(run.id).digest() == engine.adapters.state(clean.id).digest()
    assert await server.result(run, bad) == failure
