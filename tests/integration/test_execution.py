"""Log of a pool: effects of a commit, and writes of a replaced worker or scheduler, which are rejected."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.disk.stored_results import RUN_STOPPED, encoded_results
from cotrain_store.errors import Fenced, PlanOutdated, Reason, SpoolCorrupt
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import TenantId, WorkerId, encode, request_id
from cotrain_store.messages.ops import OpKind, Result, ResultKind, Step
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_store.monitoring.fleet import read_fleet
from cotrain_store.oplog.dispatch import Dispatch
from tests.support.lives import life_ms
from tests.support.log import WORKER, Log
from tests.support.processes import PATIENCE_S, Process
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.stack import POOL, pool_record_for_tests

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


def reopen(log: Log, step: Step) -> None:
    """Reopen a step, as a store that was reset to an older state would."""
    log.redis.hset(redis_keys.open_steps(POOL, WORKER), step.cycle, encode(step))


def done(log: Log, run: RunRecord) -> int:
    position = log.execution.logs.position(run.id)
    assert position
    return position.done


async def test_a_commit_publishes_results_advances_done_and_ends_its_cycle(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    step = await log.plan()
    assert log.queued() == (2, 7, len(b"body") + step.ops[0].size)
    log.commit(step)
    assert log.result(run, 0) == log.result(run, 1) == Result.of_json({"said": "done"})
    assert (done(log, run), log.queued(), log.execution.open_steps()) == (1, (0, 0, 0), [])


async def test_a_repeated_step_skips_committed_ops(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    first = await log.plan()
    log.commit(first)
    await log.submit(run, 2)
    second = await log.plan()
    both = replace(second, ops=first.ops + second.ops)
    reopen(log, both)

    log.commit(both, said="again")
    assert log.result(run, 1) == Result.of_json({"said": "done"})
    assert log.result(run, 2) == Result.of_json({"said": "again"})
    assert (done(log, run), log.queued()) == (2, (0, 0, 0))


async def test_a_second_commit_of_a_cycle_changes_nothing(log: Log) -> None:
    await log.new_run()
    step = await log.plan()
    log.commit(step)
    before = log.everything()
    log.commit(step, said="again")
    assert log.everything() == before


async def test_a_commit_out_of_order_is_rejected_and_writes_nothing(log: Log) -> None:
    ahead, neighbour = await log.new_run("a"), await log.new_run("b")
    await log.submit(ahead, 1)
    step = await log.plan()
    ops = tuple(op for op in step.ops if op.id != (ahead.id, 0))
    assert {op.run for op in ops} == {ahead.id, neighbour.id}
    before = log.everything()
    for order in (ops, ops[::-1]):
        with pytest.raises(AssertionError, match="not committed"):
            log.commit(replace(step, ops=order))
        assert log.everything() == before


async def test_a_commit_releases_a_forwards_body_and_keeps_the_others(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, OpKind.FORWARD)
    await log.submit(run, 2, OpKind.FORWARD, body=LARGE)
    await log.submit(run, 3, body=LARGE)
    assert sum(log.references().values()) == 2
    step = await log.plan()
    log.commit(step)
    create, forward, _, backward = log.execution.bodies(step.ops)
    assert (create is None, forward, backward) == (False, None, LARGE)
    assert sum(log.references().values()) == 1


async def test_a_crashed_request_keeps_its_seq_and_does_not_run_again(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, body=LARGE)
    await log.submit(run, 2)
    log.commit(await log.plan(), crashed={(run.id, 1), (run.id, 2)})
    kinds = [op.kind for op in log.execution.logs.logged_ops(run.id, 0, 2)]
    assert kinds == [OpKind.CREATE, OpKind.REJECTED, OpKind.REJECTED]
    assert log.references() == {}
    assert log.execution.register_snapshot(run.id, 2, "file", "sha")  # releases nothing twice
    assert (log.references(), log.queued()) == ({}, (0, 0, 0))


async def test_a_snapshot_cuts_the_log_to_its_predecessor_and_releases_bodies(log: Log) -> None:
    run = await log.new_run()
    for seq, kind in enumerate([OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.FORWARD], 1):
        await log.submit(run, seq, kind, body=LARGE)
    await log.run_all()
    await log.submit(run, 4, body=LARGE)
    assert sum(log.references().values()) == 2
    assert log.execution.register_snapshot(run.id, 3, "older", "sha")
    assert sum(log.references().values()) == 2
    assert [op.seq for op in log.execution.logs.logged_ops(run.id, 0, 3)] == [0, 1, 2, 3]
    await log.run_all()
    assert log.execution.register_snapshot(run.id, 4, "newer", "sha")
    assert sum(log.references().values()) == 1
    with pytest.raises(SpoolCorrupt, match="has no seq 3"):
        log.execution.logs.logged_ops(run.id, 3, 4)
    assert [op.seq for op in log.execution.logs.logged_ops(run.id, 4, 4)] == [4]


async def test_a_position_names_both_snapshots_and_the_start_of_the_log(log: Log) -> None:
    run = await log.new_run()
    for seq in (1, 2):
        await log.submit(run, seq)
    await log.run_all()
    first = log.execution.logs.position(run.id)
    assert first is not None
    assert (first.done, first.snap, first.older_snap) == (2, -1, -1)
    assert log.execution.register_snapshot(run.id, 1, "older", "sha 1")
    second = log.execution.logs.position(run.id)
    assert second == replace(first, snap=1, snapshot_file="older", snapshot_sha256="sha 1")
    assert log.execution.register_snapshot(run.id, 2, "newer", "sha 2")
    third = log.execution.logs.position(run.id)
    assert third == replace(
        first, snap=2, snapshot_file="newer", snapshot_sha256="sha 2", numerics_id="",
        older_snap=1, older_file="older", older_sha256="sha 1",
    )  # fmt: skip


async def test_a_lost_snapshot_is_replaced_and_its_predecessor_stays(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    await log.cover(run, 0)
    before = log.execution.logs.position(run.id)
    assert before is not None
    assert log.execution.register_snapshot(run.id, 1, "again", "sha 2")
    after = replace(before, snapshot_file="again", snapshot_sha256="sha 2")
    assert log.execution.logs.position(run.id) == after


@pytest.mark.parametrize("seq", [-1, 0, 2])
async def test_a_snapshot_with_an_invalid_seq_is_not_registered(log: Log, seq: int) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    log.commit(await log.plan(most=1))
    assert log.execution.register_snapshot(run.id, 0, "file", "sha")
    before = log.everything()
    assert not log.execution.register_snapshot(run.id, seq, "file", "sha")
    assert log.everything() == before


async def test_a_plan_is_all_or_nothing(log: Log) -> None:
    first, second = await log.new_run("a"), await log.new_run("b")
    queues = {queue.run: queue for queue in await log.dispatch.ready(POOL)}
    invented = replace(queues[second.id].ops[0], seq=1)
    ops = (*queues[first.id].ops, *queues[second.id].ops, invented)
    before = log.everything()
    tenants = {run.id: run.tenant for run in (first, second)}
    with pytest.raises(PlanOutdated):
        await log.dispatch.plan(POOL, Step(1, WORKER, ops, 0.0, tenants))
    assert log.everything() == before


async def test_nothing_is_planned_for_a_worker_that_hands_over_its_runs(log: Log) -> None:
    await log.new_run()
    heartbeat = WorkerHeartbeat(WORKER, 1, "draining", "cpu", 1.0, 1, 0, 0.0, is_handing_over=True)
    log.redis.set(redis_keys.worker(POOL, WORKER), encode(heartbeat))
    before = log.everything()
    with pytest.raises(PlanOutdated):
        await log.plan()
    assert log.everything() == before
    log.redis.set(redis_keys.worker(POOL, WORKER), encode(replace(heartbeat, is_handing_over=False)))
    assert (await log.plan()).cycle == 1


async def test_a_worker_has_one_open_step_at_a_time(log: Log) -> None:
    run = await log.new_run()
    await log.plan()
    await log.submit(run, 1)
    with pytest.raises(PlanOutdated):
        await log.plan()


async def test_a_closed_run_is_removed_once_its_planned_ops_are_committed(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, body=LARGE)
    step = await log.plan()
    await log.submit(run, 2, body=LARGE)
    await log.intake.close_run(run)
    assert log.execution.runs_to_drop() == [run.id]
    assert not log.execution.forget(run.id)
    log.commit(step)
    assert log.execution.forget(run.id)
    assert log.execution.forget(run.id)  # a repeat has no effect
    assert (log.references(), log.queued(), log.execution.runs_to_drop()) == ({}, (0, 0, 0), [])
    assert not log.redis.exists(redis_keys.ops(POOL, run.id), redis_keys.bodies(POOL, run.id))


async def test_a_run_closed_before_it_was_planned_leaves_only_records(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, body=LARGE)
    await log.intake.close_run(run)
    assert not log.redis.exists(redis_keys.ops(POOL, run.id), redis_keys.bodies(POOL, run.id))
    assert 0 < life_ms(log.redis, redis_keys.digests(POOL, run.id)) <= redis_keys.SMALL_RESULT_TTL_MS
    assert log.references() == {}
    assert await log.submit(run, 1, body=LARGE) == request_id(run.id, 1)  # a repeat


async def test_files_of_a_removed_run_may_be_deleted_after_its_worker_crashed(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    await log.cover(run, 0)
    assert log.execution.logs.bases(run.id) == {"f0", "f1"}
    await log.intake.close_run(run)
    assert log.execution.forget(run.id)
    assert log.execution.logs.bases(run.id) == set()


async def test_a_failed_run_stops_alone(log: Log) -> None:
    broken, neighbour = await log.new_run("a"), await log.new_run("b")
    await log.submit(broken, 1)
    step = await log.plan()
    await log.submit(broken, 2, body=LARGE)
    await log.submit(broken, 4)
    log.execution.fail_run(broken.id, broken.tenant)
    assert log.result(broken, 2) == log.result(broken, 4) == RUN_STOPPED
    log.commit(step)
    assert (log.references(), log.queued("a")) == ({}, (0, 0, 0))
    with refused(Reason.RUN_FAILED):
        await log.submit(broken, 5)
    await log.submit(neighbour, 1)
    assert {op.run for op in (await log.plan()).ops} == {neighbour.id}
    assert log.redis.smembers(redis_keys.tenant_runs(broken.tenant)) == set()  # no longer counted


async def test_a_failed_run_can_be_closed_and_leaves_nothing(log: Log) -> None:
    run = await log.new_run()
    log.commit(await log.plan())
    await log.submit(run, 1, body=LARGE)
    log.commit(await log.plan())
    log.execution.fail_run(run.id, run.tenant)
    await log.intake.close_run(run)
    position = log.execution.logs.position(run.id)
    assert position is not None
    assert position.state is RunState.CLOSED
    assert log.execution.runs_to_drop() == [run.id]
    assert log.execution.forget(run.id)
    assert log.references() == {}


async def test_a_large_result_goes_to_disk_and_expires_sooner(log: Log) -> None:
    small, large = Result(ResultKind.PASS, b"small"), Result(ResultKind.PASS, LARGE)
    with encoded_results([small, large], log.results) as (whole, (packed, ttl_ms)):
        assert whole == (small.encode(), redis_keys.SMALL_RESULT_TTL_MS)
        reference = Result.decode(packed)
    assert (reference.kind, ttl_ms) == (ResultKind.SPOOLED_PASS, redis_keys.LARGE_RESULT_TTL_MS)
    assert log.results.read(reference.payload.decode()) == LARGE


async def test_a_missing_or_changed_body_is_none(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    await log.submit(run, 2, body=LARGE)
    step = await log.plan()
    log.redis.hdel(redis_keys.bodies(POOL, run.id), 1)
    for segment in log.references():
        (log.spool.folder / segment).write_bytes(b"")
    create, *others = log.execution.bodies(step.ops)
    assert create is not None
    assert others == [None, None]


async def test_cycle_records_and_totals_are_kept(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    await log.submit(run, 1)
    await log.run_all()
    rows = [json.loads(row) for row in log.redis.lrange(redis_keys.cycles(POOL), 0, -1)]
    assert [row["cycle"] for row in rows] == [2, 1]
    assert log.redis.hget(redis_keys.counters(POOL), "cycles") == b"2"


async def test_a_commit_wakes_waiting_clients(log: Log) -> None:
    run = await log.new_run()
    with log.redis.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(redis_keys.notify_results())
        while heard.get_message(timeout=1) is not None:
            pass
        log.commit(await log.plan())
        message = None
        while message is None:
            message = heard.get_message(timeout=120)
    assert message["data"].decode() == request_id(run.id, 0)


async def test_a_log_names_the_numerics_of_its_results(log: Log) -> None:
    run = await log.new_run()

    async def committed_by(numerics_id: str, seq: int) -> str:
        log.execution.publish(replace(pool_record_for_tests(), numerics_id=numerics_id))
        await log.submit(run, seq)
        await log.run_all()
        position = log.execution.logs.position(run.id)
        assert position is not None
        return position.numerics_id

    assert await committed_by("x", 1) == "x"
    assert await committed_by("x", 2) == "x"
    assert await committed_by("y", 3) == "mixed"
    assert log.execution.register_snapshot(run.id, 2, "file", "sha")
    assert await committed_by("y", 4) == "mixed"
    assert log.execution.register_snapshot(run.id, 4, "file", "sha")
    assert await committed_by("y", 5) == "y"


async def test_a_replaced_worker_can_write_nothing(log: Log) -> None:
    run = await log.new_run()
    log.commit(await log.plan())
    await log.submit(run, 1)
    step = await log.plan()
    old = log.execution
    log.new_worker()
    before = log.everything()
    beat = WorkerHeartbeat(WORKER, old.epoch, "serving", "cpu", 1.0, 0, 0, time.time())

    with pytest.raises(Fenced):
        log.commit(step)
    with pytest.raises(Fenced):
        old.register_snapshot(run.id, 0, "file", "sha")
    with pytest.raises(Fenced):
        old.fail_run(run.id, run.tenant)
    with pytest.raises(Fenced):
        old.forget(run.id)
    with pytest.raises(Fenced):
        old.heartbeat(beat)
    assert log.everything() == before


async def test_a_replaced_scheduler_can_write_nothing(log: Log) -> None:
    run = await log.new_run()
    old = log.dispatch
    await old.resign()
    log.dispatch = Dispatch(log.connection, "successor")
    assert await log.dispatch.lead()
    before = log.everything()
    queue = (await old.ready(POOL))[0]

    with pytest.raises(Fenced):
        await old.plan(POOL, Step(1, WORKER, queue.ops, 0.0, {run.id: run.tenant}))
    with pytest.raises(Fenced):
        await old.expire_gap(POOL, run.id, TenantId("a"))
    assert not await old.lead()
    await old.resign()
    assert log.everything() == before
    assert log.redis.get(redis_keys.scheduler_lease()) == b"successor"


async def test_the_next_worker_finds_the_step_its_predecessor_left(log: Log) -> None:
    await log.new_run()
    step = await log.plan()
    successor = log.new_worker()
    assert successor.open_steps() == [step]
    log.execution = successor
    log.commit(step)
    assert successor.open_steps() == []


async def test_another_workers_start_does_not_fence_this_one(log: Log) -> None:
    run = await log.new_run()
    step = await log.plan()
    log.redis.incr(redis_keys.worker_epoch(POOL, WorkerId("w1")))
    log.commit(step)
    assert log.result(run, 0)


async def test_a_scheduler_leads_while_it_renews_and_the_next_one_has_a_newer_epoch(log: Log) -> None:
    first, second = log.dispatch, Dispatch(log.connection, "second")
    epoch = first.epoch
    assert await first.lead()
    assert first.epoch == epoch
    assert not await second.lead()
    log.redis.delete(redis_keys.scheduler_lease())  # it ran out
    assert await second.lead()
    assert second.epoch > epoch
    assert not await first.lead()
    await second.resign()
    assert await first.lead()
    assert first.epoch > second.epoch


async def ran(log: Log, run: RunRecord, seq: int) -> int:
    """Wait until a scheduler has planned an op, commit it, and return its cycle."""
    async with asyncio.timeout(PATIENCE_S):
        while not (steps := log.execution.open_steps()):
            await asyncio.to_thread(log.execution.wait, 1.0)
    [step] = steps
    assert [op.id for op in step.ops] == [(run.id, seq)]
    log.commit(step)
    return step.cycle


async def test_a_stopped_leader_is_replaced_and_plans_nothing_when_it_wakes(
    log: Log, empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    beat = WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 0, 0, 0.0)
    log.redis.set(redis_keys.worker(POOL, WORKER), json.dumps(asdict(beat)))
    await log.dispatch.resign()
    epoch = log.dispatch.epoch
    settings = {"COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path)}
    with Process("cotrain_scheduler", settings, tmp_path / "first.log") as first:
        run = await log.new_run()
        cycles = [await ran(log, run, 0)]
        assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 1
        first.send(signal.SIGSTOP)
        with Process("cotrain_scheduler", settings, tmp_path / "second.log") as second:
            await log.submit(run, 1)
            cycles.append(await ran(log, run, 1))
            assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 2
            first.send(signal.SIGCONT)
            await log.submit(run, 2)
            cycles.append(await ran(log, run, 2))
            assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 2
            await asyncio.to_thread(second.kill)
            await log.submit(run, 3)
            cycles.append(await ran(log, run, 3))
        assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 3
        await asyncio.to_thread(first.stop)
    assert cycles == [1, 2, 3, 4]
    assert log.queued() == (0, 0, 0)
