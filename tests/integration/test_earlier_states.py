"""Runs that continue from an earlier state: rewound on request, or rolled back after a loss."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Fenced, SpoolCorrupt
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from cotrain_store.oplog.reader import oldest_rewind
from cotrain_store.tenants.history import read_history
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery import run_lifecycle
from cotrain_workers.recovery.run_lifecycle import REWINDS_S, REWINDS_SHARE, RewindTime
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.log import Log, record_of
from tests.support.program import LORA, computed, numbers_of, restored_digest, results, submit, undisturbed
from tests.support.samples import Samples
from tests.support.stack import POOL, Stack, make_worker, snapshots, worker

#: The program without the pass after its last optimizer step.
LAST = 12


async def rewind(server: Stack, run: RunRecord, seq: int, step: int) -> RequestId:
    body = json.dumps({"step": step}).encode()
    return await server.intake.submit(run, seq, OpKind.REWIND, body, 0, f"back to {step}")


async def back_and_on(server: Stack, run: RunRecord) -> tuple[list[RequestId], list[RequestId]]:
    """Submit the program, a rewind to its first step, and the rest of the program again."""
    before = await submit(server, run, 1, LAST)
    before.append(await rewind(server, run, LAST + 1, 1))
    return before, await submit(server, run, 5, LAST, place=LAST + 2)


@pytest.mark.parametrize(
    ("failpoint", "ops"),
    [
        (None, 5),  # a recovery copy after the step to which it returns
        (Failpoint("logs.logged_ops", 2, after=True), 1_000),  # in the replay of the rewind
        variant(Failpoint("commit", 4), 1_000),
        (Failpoint("commit", 4, after=True), 5),
        variant(Failpoint("register_snapshot", 2), 5),
    ],
    ids=str,
)
async def test_a_run_goes_on_from_an_earlier_step_with_the_same_numbers(
    server: Stack, engine: Engine, failpoint: Failpoint | None, ops: int
) -> None:
    tuning = snapshots(ops=ops)
    expected, digest = await undisturbed(server, engine, LAST)
    run = await server.create("a", "a", LORA)
    before, after = await back_and_on(server, run)
    if failpoint:
        async with dying_worker(server, engine, failpoint, tuning=tuning):
            pass
    with worker(server, engine, tuning=tuning):
        found = await results(server, run, before)
        assert found == [*expected, {"type": "rewind", "step": 1, "seq": 4}]
        assert await results(server, run, after) == expected[4:]
    assert engine.adapters.state(run.id).digest() == digest
    assert restored_digest(server, engine, run.id) == digest
    points = await read_history(server.intake._redis, run.id)
    assert [point[1:] for point in numbers_of(points) if point[0] == "optim_step"] == [
        point[1:] for point in computed_of(expected) if point[0] == "optim_step"
    ]
    assert [point.seq for point in points if point.kind == "optim_step"] == [4, 17, 21]


def computed_of(answers: list[Any]) -> list[Any]:
    pass_after_the_end = answers[0]
    return computed([*answers, pass_after_the_end])


async def test_a_replay_after_a_kill_starts_before_the_abandoned_copies(
    server: Stack, engine: Engine, redis: Any
) -> None:
    """With a log that has a rewind in it, and no copy after the rewind."""
    _, digest = await undisturbed(server, engine, LAST)
    run = await server.create("a", "a", LORA)
    before, after = await back_and_on(server, run)
    never = snapshots(ops=1_000, replay_s=1e9)
    with worker(server, engine, tuning=never, drains=False) as loop:
        loop._runs.copies.start = lambda *_: None  # type: ignore[method-assign]  # no copy at all
        await results(server, run, [*before, *after])
    row = redis.hgetall(redis_keys.log(POOL, run.id))
    assert (row[b"snap"], row[b"rewind:13"], row[b"rewound"]) == (b"-1", b"4", b"13")
    assert sorted(int(name[5:]) for name in row if name.startswith(b"step:")) == [4, 17, 21]
    assert restored_digest(server, engine, run.id) == digest


async def test_a_step_out_of_reach_is_refused_and_the_run_continues(server: Stack, engine: Engine) -> None:
    expected, digest = await undisturbed(server, engine, LAST)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1)):
        requests = await submit(server, run, 1, 8)
        await results(server, run, requests)
    with worker(server, engine, tuning=snapshots(ops=1)):
        refused = [await rewind(server, run, 9, step) for step in (9,)]
        requests += await submit(server, run, 9, LAST, place=10)
        [answer] = await results(server, run, refused)
        assert await results(server, run, requests) == expected
        refused = [await rewind(server, run, 14, 0)]
        [answer_0] = await results(server, run, refused)
    assert answer["category"] == answer_0["category"] == "user"
    assert answer["error"].startswith("Step 9 is out of reach: this run can go back to steps ")
    assert answer_0["error"].endswith("to 3, which its log holds since its second newest recovery copy. "
                                      "Load a checkpoint for others.")  # fmt: skip
    oldest = await oldest_rewind(server.intake._redis, POOL, run.id)
    assert oldest is not None
    assert 2 <= oldest <= 3
    assert engine.adapters.state(run.id).digest() == digest


async def test_a_rewound_state_is_not_copied_out_before_its_commit(server: Stack, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1_000), drains=False):
        await results(server, run, await submit(server, run, 1, 8))
    engine.adapters.drop(run.id)
    loop, opened = make_worker(server, engine)
    run_to_end(loop._runs.ensure(run.id))
    run_to_end(loop._runs._rewind_to(run.id, 4))
    # As when Redis is lost before the commit, and the run should move to another worker.
    assert not loop._runs.copies.is_copied(run.id)
    assert run.id not in loop._runs.copies.writing
    opened.close()


def test_rewinds_of_a_tenant_take_a_share_of_the_time() -> None:
    spent, hog, other = RewindTime(), TenantId("hog"), TenantId("other")
    for now in (0.0, 40.0):
        assert spent.wait_s(hog, now) <= 0
        spent.add(hog, REWINDS_S * 0.6, now)
    assert spent.wait_s(hog, 100.0) == pytest.approx(720.0 - 100.0 - REWINDS_S / REWINDS_SHARE)
    assert spent.wait_s(other, 100.0) <= 0
    assert spent.wait_s(hog, 121.0) <= 0


async def test_a_rewind_beyond_its_share_is_refused_and_the_run_continues(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lifecycle, "REWINDS_S", 0.0)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1_000)):
        await results(server, run, await submit(server, run, 1, LAST))
        both = [await rewind(server, run, LAST + seq, 1) for seq in (1, 2)]
        first, second = await results(server, run, both)
        assert first["step"] == 1
        assert second["error"].startswith("Rewinds of one tenant may take 10% of a worker's time. ")
        after = await submit(server, run, 5, LAST, place=LAST + 3)
        # A pass has a binary answer.
        answers = await results(server, run, after)
        assert not [each for each in answers if isinstance(each, dict) and "error" in each]


LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


async def run_with_a_checkpoint(samples: Samples) -> tuple[RunRecord, CheckpointRecord]:
    """Make a run that is committed to seq 3, with a checkpoint of its state after seq 1."""
    run = await samples.log.new_run()
    checkpoint = await samples.checkpoint(run, 1, "x", kind="weights")
    for seq in (2, 3):
        await samples.log.submit(run, seq, body=LARGE)
    await samples.log.run_all()
    return run, checkpoint


def error_of(log: Log, run: RunRecord, seq: int) -> tuple[str, str]:
    result = log.result(run, seq)
    assert result is not None
    answer = result.json()
    return answer["error"], answer["category"]


async def test_planned_and_waiting_ops_fail_and_later_ones_run(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    await log.submit(run, 4, OpKind.FORWARD, body=LARGE)
    await log.plan()
    for seq, kind in ((5, OpKind.OPTIM_STEP), (6, OpKind.LOAD), (8, OpKind.FORWARD_BACKWARD)):
        await log.submit(run, seq, kind, body=LARGE)
    assert log.execution.roll_back(checkpoint, "f3", "sha") == 1

    said = (
        f"The server lost this run's newest state; it goes on from {checkpoint.path} (after request 1). "
        "weights_epoch is now 1."
    )
    for seq in (4, 5, 6, 8):
        assert error_of(log, run, seq) == (said, "server")
    assert log.result(run, 3)
    assert log.references() == {}
    [step] = log.execution.open_steps()
    assert [op.kind for op in step.ops] == [OpKind.REJECTED]
    log.commit(step, said="as if nothing had happened")
    assert error_of(log, run, 4) == (said, "server")
    await log.submit(run, 7)
    await log.submit(run, 9)
    await log.run_all()
    kinds = [op.kind for op in log.execution.logs.logged_ops(run.id, 4, 9)]
    passed = OpKind.FORWARD_BACKWARD
    assert kinds == [*[OpKind.REJECTED] * 3, passed, OpKind.REJECTED, passed]
    for seq in (7, 9):
        result = log.result(run, seq)
        assert result
        assert "error" not in result.json()
    assert log.queued() == (0, 0, 0)


async def test_only_the_file_remains_and_precedes_the_next_snapshot(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    log.execution.register_snapshot(run.id, 2, "f2", "sha 2")
    log.execution.roll_back(checkpoint, "f3", "sha 3")
    position = log.execution.logs.position(run.id)
    assert position is not None
    assert (position.done, position.snap, position.older_snap) == (3, 3, 3)
    assert (position.snapshot_file, position.snapshot_sha256) == ("f3", "sha 3")
    assert (position.older_file, position.numerics_id, position.older_numerics_id) == ("", "", "")
    assert (position.weights_epoch, position.rolled_back_to) == (1, checkpoint.path)
    assert position.state is RunState.LIVE
    with pytest.raises(SpoolCorrupt):
        log.execution.logs.logged_ops(run.id, 3, 3)
    await log.submit(run, 4)
    await log.run_all()
    assert log.execution.register_snapshot(run.id, 4, "f4", "sha 4")
    position = log.execution.logs.position(run.id)
    assert position is not None
    assert (position.older_snap, position.older_file, position.weights_epoch) == (3, "f3", 1)


async def test_a_rollback_is_reported_with_its_run_and_counted(samples: Samples) -> None:
    run, checkpoint = await run_with_a_checkpoint(samples)
    assert (await samples.records.run(run.tenant, run.id)).weights_epoch == 0
    samples.log.execution.roll_back(checkpoint, "f3", "sha")
    samples.log.execution.roll_back(checkpoint, "f3", "sha")
    told = await samples.records.run(run.tenant, run.id)
    assert (told.weights_epoch, told.rolled_back_to) == (2, checkpoint.path)
    assert told.state is RunState.LIVE
    assert samples.log.redis.hget(redis_keys.counters(POOL), "rollbacks") == b"2"


async def test_a_repeat_after_a_lost_answer_changes_nothing(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    before = log.execution.logs.position(run.id)
    assert before is not None
    log.execution.roll_back(checkpoint, "f3", "sha")
    await log.submit(run, 4)
    once = log.everything()
    log.execution._roll_back(before, checkpoint, "f3", "sha")
    assert log.everything() == once
    assert log.result(run, 4) is None


async def test_other_runs_of_the_step_run_as_planned(samples: Samples) -> None:
    log = samples.log
    run, checkpoint = await run_with_a_checkpoint(samples)
    other = await log.new_run("b")
    await log.submit(run, 4)
    planned = await log.plan()
    log.execution.roll_back(checkpoint, "f3", "sha")
    [step] = log.execution.open_steps()
    others = [op for op in planned.ops if op.run == other.id]
    assert [op for op in step.ops if op.run == other.id] == others
    log.commit(step)
    assert log.result(other, 0)
    assert (log.queued("a"), log.queued("b")) == ((0, 0, 0), (0, 0, 0))


async def test_a_replaced_worker_rolls_nothing_back(samples: Samples) -> None:
    run, checkpoint = await run_with_a_checkpoint(samples)
    await samples.log.submit(run, 4)
    samples.log.new_worker()
    before = samples.log.everything()
    with pytest.raises(Fenced):
        samples.log.execution.roll_back(checkpoint, "f3", "sha")
    assert samples.log.everything() == before


async def test_a_run_can_go_back_only_to_its_own_training_checkpoints(samples: Samples) -> None:
    log = samples.log
    run, first = await run_with_a_checkpoint(samples)
    await samples.checkpoint(run, 4, "for-sampling")
    second = await samples.checkpoint(run, 5, "y", kind="weights")
    await samples.save(run, 6, name="not-stored", kind="weights")
    copied = replace(record_of("a", "copy"), state=RunState.CLOSED)
    assert log.execution.logs.checkpoints(run.id) == [second, first]
    assert log.execution.logs.checkpoints(copied.id) == []
