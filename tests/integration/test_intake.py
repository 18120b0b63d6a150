"""Acceptance of requests, of one run or of several at once: once, in order, or rejected without a trace."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, SpoolRef
from cotrain_store.errors import Reason, RunClosed, RunNotFound, SeqConflict
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_store.oplog.intake import MAX_SEQ_GAP
from cotrain_store.oplog.joint_intake import JointIntake, JointOp
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.quotas import Quotas
from tests.support.limits import always
from tests.support.log import Log, open_log, record_of
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.stack import POOL

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


async def seqs_ready(log: Log) -> list[int]:
    return [op.seq for queue in await log.dispatch.ready(POOL) for op in queue.ops]


def written_bytes(log: Log) -> int:
    return sum(file.stat().st_size for file in log.spool.folder.iterdir() if file.is_file())


async def test_a_repeat_gets_the_same_request_and_is_one_op(log: Log) -> None:
    run = await log.new_run()
    once = await log.submit(run, 1)
    before = log.everything()
    assert await log.submit(run, 1) == once == f"{run.id}:1"
    assert log.everything() == before


async def test_concurrent_repeats_are_one_op(log: Log) -> None:
    run = await log.new_run()
    requests = await asyncio.gather(*(log.submit(run, 1, body=LARGE) for _ in range(40)))
    assert set(requests) == {f"{run.id}:1"}
    assert log.queued()[0] == 2
    assert sum(log.references().values()) == 1


@pytest.mark.parametrize("is_digest_stored", [True, False])
async def test_a_repeat_long_after_its_commit_gets_the_same_request(log: Log, is_digest_stored: bool) -> None:
    run = await log.new_run()
    once = await log.submit(run, 1)
    await log.run_all()
    if is_digest_stored:
        log.execution.register_snapshot(run.id, 1, "file", "sha")
    else:
        log.redis.hdel(redis_keys.digests(POOL, run.id), 1)
    before = log.everything()
    assert await log.submit(run, 1) == once
    assert log.everything() == before


async def test_a_seq_used_with_other_content_is_a_conflict(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    before = log.everything()
    with pytest.raises(SeqConflict, match="seq_id 1 was already used with different content"):
        await log.submit(run, 1, body=b"other")
    assert log.everything() == before


async def test_a_repeated_creation_is_one_run(log: Log) -> None:
    run = record_of("a")
    assert await log.intake.create_run(run) == f"{run.id}:0"
    before = log.everything()
    assert await log.intake.create_run(replace(run, created_at=run.created_at + 1)) == f"{run.id}:0"
    with pytest.raises(SeqConflict):
        await log.intake.create_run(replace(run, lora=LoraSpec(rank=2, seed=0)))
    assert log.everything() == before


async def test_ops_that_arrive_out_of_order_run_in_order(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    for seq in (3, 2, 5):
        await log.submit(run, seq)
    assert await seqs_ready(log) == []
    await log.submit(run, 1)
    assert await seqs_ready(log) == [1, 2, 3]
    log.commit(await log.plan())
    assert await seqs_ready(log) == []
    await log.submit(run, 4)
    assert await seqs_ready(log) == [4, 5]


async def test_a_run_ends_once_and_its_pending_ops_fail(log: Log) -> None:
    run = await log.new_run()
    step = await log.plan()
    await log.submit(run, 1, body=LARGE)
    await log.submit(run, 3)
    request = await log.intake.close_run(run)
    for seq in (1, 3):
        failure = log.result(run, seq)
        assert failure is not None
        assert failure.json()["category"] == "user"
    assert (log.references(), log.queued()[0]) == ({}, 1)
    assert await log.intake.close_run(run) == request == f"{run.id}:unload"
    log.commit(step)
    assert log.result(run, 0) == Result.of_json({"said": "done"})
    assert log.queued() == (0, 0, 0)
    with pytest.raises(RunClosed):
        await log.submit(run, 4)


async def test_a_reported_failure_remains_when_its_run_ends(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 2)
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    told = log.result(run, 2)
    assert told is None  # seq 0 exists, so nothing is missing before it
    await log.run_all()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    told = log.result(run, 2)
    await log.intake.close_run(run)
    assert told is not None
    assert log.result(run, 2) == told
    assert log.queued() == (0, 0, 0)


async def test_requests_to_a_missing_run_are_rejected(log: Log) -> None:
    before = log.everything()
    stranger = record_of("a")
    with pytest.raises(RunNotFound):
        await log.submit(stranger, 1)
    with pytest.raises(RunNotFound):
        await log.intake.close_run(stranger)
    assert log.everything() == before


async def test_a_seq_far_ahead_is_rejected_and_leaves_nothing(log: Log) -> None:
    run = await log.new_run()
    before = log.everything()
    with refused(Reason.SEQ_TOO_FAR, match="too far ahead"):
        await log.submit(run, MAX_SEQ_GAP)
    assert log.everything() == before
    await log.submit(run, MAX_SEQ_GAP - 1)


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        (Quotas(ops=2), b"x"),
        (Quotas(tokens=13), b"x"),
        (Quotas(bytes=200), b"x" * 200),
        (Quotas(bytes=200), LARGE),
    ],
)
async def test_a_full_queue_rejects_without_a_trace_but_accepts_repeats(
    empty_redis: EmbeddedRedis, tmp_path: Path, limits: Quotas, body: bytes
) -> None:
    async with open_log(empty_redis.url, tmp_path, limits) as log:
        run = await log.new_run()
        first = await log.submit(run, 1, body=b"y")
        before = log.everything()
        with refused(Reason.QUEUE_FULL):
            await log.submit(run, 2, body=body)
        assert log.everything() == before
        assert await log.submit(run, 1, body=b"y") == first

        other = await log.new_run("b")  # each tenant has its own queue
        assert await log.submit(other, 1, body=b"y")
        await log.run_all()
        if body is not LARGE:
            assert await log.submit(run, 2, body=body)


@pytest.mark.parametrize("body", [b"x", LARGE])
async def test_a_full_queue_accepts_the_request_that_all_others_wait_for(
    empty_redis: EmbeddedRedis, tmp_path: Path, body: bytes
) -> None:
    async with open_log(empty_redis.url, tmp_path, Quotas(ops=3)) as log:
        run = await log.new_run()
        await log.run_all()
        for seq in (3, 4, 5):
            await log.submit(run, seq)
        for seq in (2, 6):  # neither is the first missing one
            with refused(Reason.QUEUE_FULL):
                await log.submit(run, seq, body=body)
        await log.submit(run, 1, body=body)
        with refused(Reason.QUEUE_FULL):  # one at a time
            await log.submit(run, 2, body=body)
        step = await log.plan()
        assert [op.seq for op in step.ops] == [1]
        assert log.execution.bodies(step.ops) == [body]
        log.commit(step)
        await log.submit(run, 2, body=body)
        assert await seqs_ready(log) == [2, 3, 4, 5]


async def test_a_full_queue_rejects_a_large_request_before_it_is_written(
    empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    async with open_log(empty_redis.url, tmp_path, Quotas(ops=2)) as log:
        run = await log.new_run()
        first = await log.submit(run, 1, body=LARGE)
        before = written_bytes(log)
        with refused(Reason.QUEUE_FULL):
            await log.submit(run, 2, body=LARGE)
        assert await log.submit(run, 1, body=LARGE) == first  # and still recognizes a repeat
        with pytest.raises(SeqConflict):
            await log.submit(run, 1, body=LARGE + b"x")
        assert written_bytes(log) == before
        await log.run_all()
        assert await log.submit(run, 2, body=LARGE)
        assert written_bytes(log) > before


async def test_live_runs_are_limited_per_tenant(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with open_log(empty_redis.url, tmp_path, Quotas(runs=1)) as log:
        first = await log.new_run("a", "s1")
        before = log.everything()
        with refused(Reason.RUN_QUOTA_REACHED, match=f"1 of 1 runs .*{first.id}.*runs end"):
            await log.new_run("a", "s2")
        assert log.everything() == before
        assert await log.intake.create_run(first) == f"{first.id}:0"
        await log.new_run("b")
        await log.intake.close_run(first)
        await log.new_run("a", "s2")


async def test_a_run_and_its_save_are_accepted_together_or_not_at_all(
    empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    async with open_log(empty_redis.url, tmp_path, Quotas(ops=2)) as log:
        first = await log.new_run("a", "s1")
        before = log.everything()
        run = record_of("a", "s2")
        with refused(Reason.QUEUE_FULL):
            await log.intake.create_run(run, kind=OpKind.LOAD, body=b"load", save=b"save")
        assert log.everything() == before

        await log.run_all()
        await log.intake.create_run(run, kind=OpKind.LOAD, body=b"load", save=b"save")
        once = log.everything()
        await log.intake.create_run(run, kind=OpKind.LOAD, body=b"load", save=b"save")
        assert log.everything() == once
        assert log.queued() == (2, 0, 8)
        step = await log.plan()
        assert [(op.seq, op.kind) for op in step.ops] == [(0, OpKind.LOAD), (1, OpKind.SAVE)]
        assert log.execution.bodies(step.ops) == [b"load", b"save"]
        log.commit(step)
        assert log.queued() == (0, 0, 0)
        assert log.result(first, 0)


async def test_the_bytes_of_a_run_and_of_its_save_count_together(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with open_log(empty_redis.url, tmp_path, Quotas(bytes=7)) as log:
        with refused(Reason.QUEUE_FULL):
            await log.intake.create_run(record_of("a"), kind=OpKind.LOAD, body=b"load", save=b"save")
        await log.intake.create_run(record_of("a"), kind=OpKind.LOAD, body=b"lo", save=b"save")


async def test_a_large_body_goes_to_disk_and_a_small_one_to_redis(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, body=b"small")
    await log.submit(run, 2, body=LARGE)
    step = await log.plan()
    assert [op.ref == "inline" for op in step.ops] == [True, True, False]
    assert log.execution.bodies(step.ops)[1:] == [b"small", LARGE]
    assert not log.redis.hexists(redis_keys.bodies(POOL, run.id), 2)


@pytest.mark.parametrize("body", [b"small", LARGE])
async def test_below_the_disk_reserve_new_requests_are_rejected(
    empty_redis: EmbeddedRedis, tmp_path: Path, body: bytes
) -> None:
    async with open_log(empty_redis.url, tmp_path) as log:
        run = await log.new_run()
        before = log.everything()
        async with open_log(empty_redis.url, tmp_path, disk_reserve_bytes=1 << 60) as full:
            before = log.everything()
            with refused(Reason.DISK_RESERVE_REACHED):
                await full.submit(run, 1, body=body)
            with refused(Reason.DISK_RESERVE_REACHED):
                await full.new_run("b")
            assert log.everything() == before


async def test_a_full_disk_rejects_and_leaves_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = await log.new_run()
    before = log.everything()
    with monkeypatch.context() as full:
        full.setattr("cotrain_store.disk.spool.os.fdatasync", no_space)
        with refused(Reason.DISK_RESERVE_REACHED):
            await log.submit(run, 1, body=LARGE)
    assert log.everything() == before
    assert await log.submit(run, 1, body=LARGE)


async def test_a_cancelled_large_request_does_not_stop_the_others(log: Log) -> None:
    run = await log.new_run()
    submits = [asyncio.create_task(log.submit(run, seq, body=LARGE)) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for submit in submits[::2]:
        submit.cancel()
    await asyncio.gather(*submits, return_exceptions=True)
    for seq in range(1, 21):
        assert await log.submit(run, seq, body=LARGE)
    assert await seqs_ready(log) == list(range(21))
    assert sum(log.references().values()) == 20


async def test_an_almost_full_redis_rejects_new_requests_and_finishes_old_ones(
    empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_log(empty_redis.url, tmp_path) as log:
        run = await log.new_run()
        await log.submit(run, 1)
        monkeypatch.setattr("cotrain_store.disk.capacity.MEMORY_SHARE", 1e-6)
        async with open_log(empty_redis.url, tmp_path) as full:
            before = log.everything()
            with refused(Reason.STORE_FULL):
                await full.submit(run, 2)
            assert log.everything() == before
            await full.run_all()
            assert full.result(run, 1) is not None
        monkeypatch.setattr("cotrain_store.disk.capacity.MEMORY_SHARE", 1.0)
        async with open_log(empty_redis.url, tmp_path) as emptied:
            await emptied.submit(run, 2)


async def test_without_redis_requests_are_rejected_and_accepted_afterwards(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log:
            run = await log.new_run()
            server.kill()
            with pytest.raises(CONNECTION_LOST):
                await log.submit(run, 1)
            with pytest.raises(CONNECTION_LOST):
                await log.intake.close_run(run)
            server.restart()
            assert await log.submit(run, 1)
            assert await seqs_ready(log) == [0, 1]


async def test_accepted_requests_survive_a_kill_of_redis(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log:
            run = await log.new_run()
            for seq in range(1, 20):
                await log.submit(run, seq, body=LARGE if seq % 3 == 0 else b"small")
            before = log.everything()
            server.kill()
            server.restart()
            assert log.everything() == before


async def accepted(log: Log, run: RunRecord, seq: int) -> str:
    while True:
        try:
            return await log.submit(run, seq, OpKind.FORWARD, body=b"%d" % seq)
        except CONNECTION_LOST:
            await asyncio.sleep(0.02)


async def test_requests_across_kills_of_redis_are_accepted_once_each(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with open_log(server.url, tmp_path) as log:
            runs = [await log.new_run(f"t{number}") for number in range(4)]
            submits = [asyncio.create_task(accepted(log, run, seq)) for seq in range(1, 60) for run in runs]
            for _ in range(3):
                await asyncio.sleep(0.02)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.restart)
            assert len(set(await asyncio.gather(*submits))) == 4 * 59
            for queue in await log.dispatch.ready(POOL):
                assert [op.seq for op in queue.ops] == list(range(60))
            assert all(log.queued(run.tenant)[0] == 60 for run in runs)


A = TenantId("a")
BODY = b"x" * (INLINE_LIMIT_BYTES // 2)
RUNS = 4


@pytest.fixture
async def runs(log: Log) -> list[RunRecord]:
    made = [await log.new_run(session=f"s{number}") for number in range(RUNS)]
    await log.run_all()
    return made


def intake_of(log: Log, limits: Quotas | None = None) -> JointIntake:
    return JointIntake(log.connection, log.spool, always(limits or Quotas()))


def ops_of(runs: list[RunRecord], seq: int = 1) -> list[JointOp]:
    """Return a pass with a common body, and an optimizer step, for each run."""
    made = []
    for run in runs:
        made += [
            JointOp(run, seq, OpKind.FORWARD_BACKWARD, BODY, 7, "pass"),
            JointOp(run, seq + 1, OpKind.OPTIM_STEP, b"{}", 0, "step"),
        ]
    return made


async def test_all_ops_are_in_one_plan_and_share_one_body(log: Log, runs: list[RunRecord]) -> None:
    ops = ops_of(runs)
    accepted = await intake_of(log).submit_together(A, ops)
    assert accepted == [f"{op.run.id}:{op.seq}" for op in ops]
    assert log.queued() == (2 * RUNS, 7 * RUNS, RUNS * (len(BODY) + 2))
    before = log.everything()
    assert await intake_of(log).submit_together(A, ops) == accepted
    assert {key: log.everything()[key] for key in before} == before

    step = await log.plan()
    assert len(step.ops) == 2 * RUNS
    (ref,) = {op.ref for op in step.ops if op.kind is OpKind.FORWARD_BACKWARD}
    assert {op.ref for op in step.ops if op.kind is OpKind.OPTIM_STEP} == {"inline"}
    assert log.execution.bodies(step.ops) == [BODY, b"{}"] * RUNS
    assert log.references() == {SpoolRef.parse(ref).segment: RUNS}


async def test_an_ended_run_does_not_affect_the_others(log: Log, runs: list[RunRecord]) -> None:
    await log.intake.close_run(runs[1])
    accepted = await intake_of(log).submit_together(A, ops_of(runs))
    assert [type(each) for each in accepted[2:4]] == [RunClosed, RunClosed]
    assert len([each for each in accepted if isinstance(each, str)]) == 2 * (RUNS - 1)
    assert len((await log.plan()).ops) == 2 * (RUNS - 1)


async def test_a_full_queue_accepts_a_part_and_the_repeat_the_remainder(log: Log, runs: list[RunRecord]) -> None:
    intake = intake_of(log, Quotas(ops=5))
    with refused(Reason.QUEUE_FULL):
        await intake.submit_together(A, ops_of(runs))
    assert log.queued()[0] == 5
    stored = log.references()
    with refused(Reason.QUEUE_FULL):  # and nothing is stored for it
        await intake.submit_together(A, ops_of(runs))
    assert log.references() == stored
    await log.run_all()
    assert len(await intake.submit_together(A, ops_of(runs))) == 2 * RUNS
    assert log.queued()[0] == 2 * RUNS - 5
    assert {op.run for op in (await log.plan()).ops} <= {run.id for run in runs}


async def test_a_body_is_removed_with_the_last_log_that_needs_it(log: Log, runs: list[RunRecord]) -> None:
    await intake_of(log).submit_together(A, ops_of(runs))
    await log.run_all()
    for left, run in zip((3, 2, 1, 0), runs, strict=True):
        await log.cover(run, 2)
        assert sum(log.references().values()) == left
