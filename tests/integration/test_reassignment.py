"""Work of a worker id without a heartbeat: another worker of its pool takes over its runs and pending saves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import WorkerId
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.execution import Execution
from cotrain_store.sampling.claims import SampleClaims
from cotrain_store.weights import SavedWeights
from cotrain_workers.engine.engine import Engine
from tests.support.checkpoints import checkpoint_of, run_from, submit_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.log import WORKER, Log
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.samples import Samples, sampler_record
from tests.support.sampling import ended, submit_sample, submit_save
from tests.support.stack import POOL, Stack, pool_record_for_tests, snapshots, worker
from tests.support.waiting import until

DEAD, HEIR = WorkerId("w0"), WorkerId("w1")
THIRD = WorkerId("w2")


def enter(log: Log, worker: WorkerId) -> Execution:
    """Start another worker, and let it be seen."""
    execution = Execution(log.redis, log.spool, log.results, POOL, worker)
    epoch = execution.claim()
    execution.publish(pool_record_for_tests())
    execution.heartbeat(WorkerHeartbeat(worker, epoch, "serving", "cpu", 1.0, 0, 0, 0.0))
    return execution


async def place_of(log: Log, worker: WorkerId = WORKER) -> WorkerSlot:
    return next(place for place in (await log.dispatch.view(POOL)).slots if place.worker == worker)


async def reassign(log: Log, heir: WorkerId = HEIR) -> None:
    assert await log.dispatch.reassign(POOL, await place_of(log), heir)


def sampling_of(log: Log, execution: Execution) -> SampleClaims:
    return SampleClaims(log.redis, log.spool, log.results, POOL, execution.worker, execution.epoch)


async def test_an_open_step_is_run_by_the_heir_as_it_was_planned(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    step, zombie = await log.plan(), log.execution
    log.execution = enter(log, HEIR)
    await reassign(log)
    [moved] = log.execution.open_steps()
    assert (moved.cycle, moved.ops, moved.worker) == (step.cycle, step.ops, HEIR)
    before = log.everything()
    with pytest.raises(Fenced):
        zombie.commit(step, {(run.id, seq): Result.of_json({}) for seq in (0, 1)}, {}, {})
    with pytest.raises(Fenced):
        zombie.register_snapshot(run.id, 0, "file", "sha")
    assert log.everything() == before
    log.commit(moved)
    assert log.result(run, 1)
    assert log.queued() == (0, 0, 0)
    assert not log.redis.exists(redis_keys.open_steps(POOL, WORKER), redis_keys.open_steps(POOL, HEIR))


async def test_the_heir_knows_how_many_died_over_a_step_and_over_its_parts(log: Log) -> None:
    run = await log.new_run()
    step = await log.plan()
    assert log.execution.crashes(step) == 0
    successor = log.new_worker()
    [found] = successor.open_steps()
    assert successor.crashes(found) == 1
    successor.begin(found)
    successor.crash_counts.risk(f"{run.id}:0")
    log.execution = enter(log, HEIR)
    await reassign(log)
    [moved] = log.execution.open_steps()
    assert log.execution.crashes(moved) == 2
    assert log.execution.crash_counts.by_part() == {f"{run.id}:0": 1}
    log.commit(moved)
    assert log.execution.crash_counts.by_part() == {}
    assert not log.redis.exists(redis_keys.starts(POOL))


async def test_only_what_ends_while_a_step_runs_crashed_over_it(log: Log) -> None:
    """Neither who brings its runs back and is killed, nor who ends because it was told to."""
    await log.new_run()
    step = await log.plan()
    log.execution.begin(step)
    log.execution.leave_in_order()
    for _ in range(3):  # killed while they bring its runs back
        log.execution = log.new_worker()
        [step] = log.execution.open_steps()
        assert log.execution.crashes(step) == 0
    log.execution.begin(step)
    log.execution.leave_in_order()
    log.execution = log.new_worker()
    assert log.execution.crashes(step) == 0
    log.execution.begin(step)
    log.execution.begin(step)  # once more, after a pause
    log.execution = log.new_worker()
    assert log.execution.crashes(step) == 1
    log.commit(step)
    assert not log.redis.exists(redis_keys.starts(POOL))


async def test_a_commit_leaves_what_is_held_against_another_step(log: Log) -> None:
    first = await log.new_run("a")
    step = await log.plan()
    log.execution.crash_counts.risk(f"{first.id}:0..{first.id}:7")
    log.execution.crash_counts.risk("s:train:9:0")
    log.commit(step)
    assert log.execution.crash_counts.by_part() == {"s:train:9:0": 1}


async def test_runs_at_work_belong_to_the_heir_and_the_others_to_whoever_is_free(log: Log) -> None:
    resting, working = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    await log.submit(working, 1)
    await log.plan()
    for run in (resting, working):
        await log.submit(run, 2 if run is working else 1)
    heir = enter(log, HEIR)
    owners = {queue.run: queue.worker for queue in await log.dispatch.ready(POOL)}
    assert owners == {resting.id: WORKER, working.id: WORKER}
    await reassign(log)
    owners = {queue.run: queue.worker for queue in await log.dispatch.ready(POOL)}
    assert owners == {resting.id: None, working.id: HEIR}
    log.execution = heir
    log.commit(heir.open_steps()[0])


async def test_an_owed_save_goes_to_the_heir_with_its_run(samples: Samples) -> None:
    log = samples.log
    run = await log.new_run()
    await samples.save(run, 1, name="x")
    heir = enter(log, HEIR)
    await reassign(log)
    saved = SavedWeights(log.redis, POOL, heir.worker, heir.epoch)
    [owed] = saved.unstored()
    assert samples.saved.unstored() == []
    assert log.redis.hget(redis_keys.log(POOL, run.id), "worker") == HEIR.encode()
    with pytest.raises(Fenced):
        samples.stored(run, 1)
    assert saved.mark_stored(owed.ref, "digest", 10)
    assert log.result(run, 1)
    assert saved.unstored() == []


async def test_sample_requests_go_on_in_their_order(samples: Samples) -> None:
    log = samples.log
    run = await log.new_run()
    _, saves = await samples.save(run, 1, sampler=7)
    fresh = sampler_record(weights=saves[run.id, 1].weights.ref, number=7, ephemeral=True)
    base = await samples.sampler("a", 1)
    first, second, third = await samples.submit(fresh, 0, 1, 2)
    anywhere = await samples.submit(base, 0, 1)
    assert samples.claim(2) == [first, second]
    await samples.intake.cancel(fresh.tenant, second)
    heir = enter(log, HEIR)
    await reassign(log)
    assert samples.load()[:2] == (4, 0)
    with pytest.raises(Fenced):
        samples.resolve(first)
    sampling = sampling_of(log, heir)
    claimed = sampling.claim(9)
    assert [one.request for one in claimed] == [first, third, *anywhere]
    assert [one.starts for one in claimed] == [1, 0, 0, 0]
    result = samples.result(second)
    assert result is not None
    assert result.json()["category"] == "user"  # cancelled
    later = (await samples.submit(fresh, 3))[0]
    assert log.redis.hget(redis_keys.sample(later), "lane") == HEIR.encode()


async def test_what_waits_for_weights_that_are_stored_may_run_anywhere(samples: Samples) -> None:
    log = samples.log
    run = await log.new_run()
    _, saves = await samples.save(run, 1, sampler=7)
    fresh = sampler_record(weights=saves[run.id, 1].weights.ref, number=7, ephemeral=True)
    [request] = await samples.submit(fresh, 0)
    samples.stored(run, 1)
    enter(log, HEIR)
    third = enter(log, THIRD)
    await reassign(log)
    assert [one.request for one in sampling_of(log, third).claim(1)] == [request]


async def test_a_closed_run_of_a_dead_worker_is_dropped_by_another(log: Log) -> None:
    before, after = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    await log.intake.close_run(before)
    heir = enter(log, HEIR)
    await reassign(log)
    assert heir.runs_to_drop() == [before.id]
    await log.intake.close_run(after)
    assert heir.runs_to_drop() == sorted([before.id, after.id])
    assert heir.forget(before.id)
    assert heir.forget(after.id)


async def test_a_place_that_is_taken_again_starts_empty(log: Log) -> None:
    run = await log.new_run()
    await log.plan()
    heir = enter(log, HEIR)
    await reassign(log)
    again = enter(log, WORKER)
    assert again.open_steps() == []
    log.execution = heir
    log.commit(heir.open_steps()[0])
    await log.submit(run, 1)
    [queue] = await log.dispatch.ready(POOL)
    assert queue.worker == HEIR


@pytest.mark.parametrize("change", ["woke up", "came back", "was there in between", "heir died"])
async def test_nothing_is_given_away_when_it_changed_meanwhile(log: Log, change: str) -> None:
    await log.new_run()
    await log.plan()
    enter(log, HEIR)
    place = await place_of(log)
    if change == "woke up":  # its lease had run out
        beat = WorkerHeartbeat(WORKER, place.epoch, "serving", "cpu", 1.0, 0, 0, 0.0)
        log.execution.heartbeat(beat)
    elif change == "came back":
        enter(log, WORKER)
    elif change == "was there in between":
        log.new_worker()
    else:
        log.redis.delete(redis_keys.worker(POOL, HEIR))
    before = log.everything()
    assert not await log.dispatch.reassign(POOL, place, HEIR)
    assert log.everything() == before


async def test_a_second_time_changes_nothing_and_a_replaced_scheduler_gives_nothing_away(log: Log) -> None:
    await log.new_run()
    await log.plan()
    enter(log, HEIR)
    place, old = await place_of(log), log.dispatch
    await old.resign()
    log.dispatch = Dispatch(log.connection, "successor")
    assert await log.dispatch.lead()
    before = log.everything()
    with pytest.raises(Fenced):
        await old.reassign(POOL, place, HEIR)
    assert log.everything() == before
    assert await log.dispatch.reassign(POOL, place, HEIR)
    before = log.everything()
    assert await log.dispatch.reassign(POOL, place, HEIR)
    assert log.everything() == before
    assert WORKER not in {one.worker for one in (await log.dispatch.view(POOL)).slots}


async def test_a_step_of_any_content_is_moved_whole(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1, OpKind.OPTIM_STEP, body=b"\xff\x00")
    step = await log.plan()
    [text] = log.redis.hvals(redis_keys.open_steps(POOL, WORKER))
    enter(log, HEIR)
    await reassign(log)
    assert log.redis.hvals(redis_keys.open_steps(POOL, HEIR)) == [text]
    assert json.loads(text)["cycle"] == step.cycle


STEP = 4


async def inherit(server: Stack, redis: Any) -> None:
    """Reassign the runs of the dead worker to the other one, without waiting for the timeout."""
    redis.delete(redis_keys.worker(POOL, DEAD))
    await until(lambda: redis.exists(redis_keys.worker(POOL, HEIR)))
    (place,) = [place for place in (await server.dispatch.view(POOL)).slots if place.worker == DEAD]
    assert await server.dispatch.reassign(POOL, place, HEIR)


async def owner(redis: Any, run: RunRecord) -> bytes:
    found: bytes = redis.hget(redis_keys.log(POOL, run.id), "worker")
    return found


@pytest.mark.parametrize(
    "failpoint",
    [
        variant(Failpoint("bodies")),
        Failpoint("commit", 1),
        Failpoint("commit", 1, after=True),
        variant(Failpoint("commit", 2)),
        variant(Failpoint("mark_stored", of_weights=True)),
    ],
    ids=str,
)
async def test_a_successor_continues_with_the_same_numbers_and_saves(
    server: Stack, engine: Engine, redis: Any, failpoint: Failpoint
) -> None:
    expected, digest = await undisturbed(server, engine, last=2 * STEP)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, STEP)
    save = await submit_state(server, run, STEP + 1)
    requests += await submit(server, run, STEP + 1, 2 * STEP, place=STEP + 2)
    async with dying_worker(server, engine, failpoint, tuning=snapshots(ops=2)):
        pass
    engine.adapters.drop(run.id)
    with worker(server, engine, worker_id=HEIR):
        await inherit(server, redis)
        assert await results(server, run, requests) == expected
        checkpoint = await checkpoint_of(server, run, save)
        assert await owner(redis, run) == HEIR.encode()
        twin = await run_from(server, "a", "twin", checkpoint)
        await results(server, twin, await submit(server, twin, STEP + 1, 2 * STEP, place=1))
    assert engine.adapters.state(run.id).digest() == digest
    assert engine.adapters.state(twin.id).weights.equal(engine.adapters.state(run.id).weights)


async def test_a_successor_samples_from_weights_that_it_must_still_restore(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may reach the successor first; the weights are made again for it."""
    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RELOAD_S", 3600.0)
    run = await server.create("a", "a", LORA)
    await submit(server, run, 1, STEP)
    save = await submit_save(server, run, STEP + 1)
    async with dying_worker(server, engine, Failpoint("mark_stored", of_weights=True)):
        await server.result(run, save)
    sampler = await server.records.sampler(run.tenant, "a:sample:0")
    request = await submit_sample(server, sampler, 1)
    engine.adapters.drop(run.id)
    with worker(server, engine, worker_id=HEIR) as loop:
        await until(lambda: loop._weights._reload_at)
        await inherit(server, redis)
        assert (await ended(server, sampler, request)).kind is ResultKind.SAMPLE


async def test_a_worker_that_was_given_up_can_write_nothing(server: Stack, engine: Engine, redis: Any) -> None:
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 1)
    async with dying_worker(server, engine, Failpoint("bodies")) as zombie:
        pass
    engine.adapters.drop(run.id)
    (step,) = zombie._execution.open_steps()
    with worker(server, engine, worker_id=HEIR):
        await inherit(server, redis)
        await results(server, run, requests)
    late = {op.id: Result.failed("late", "server") for op in step.ops}
    with pytest.raises(Fenced):
        zombie._execution.commit(step, late, {}, {})
    with pytest.raises(Fenced):
        zombie._execution.heartbeat(zombie._heartbeat._describe())


async def test_a_run_that_ran_elsewhere_is_not_continued_from_stale_memory(
    server: Stack, engine: Engine, redis: Any
) -> None:
    """The test moves the run without the worker.

    In practice, a run returns when the other worker crashes.
    """
    expected, digest = await undisturbed(server, engine, last=2 * STEP)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, worker_id=HEIR) as loop:
        answers = await results(server, run, await submit(server, run, 1, STEP))
        await until(lambda: loop._runs.copies.backlogs[run.id].seq == STEP)  # after the results
        stale, debt = engine.adapters.state(run.id), loop._runs.copies.backlogs[run.id]
        debt_before = type(debt)(debt.seq, used_at=debt.used_at)
        requests = await submit(server, run, STEP + 1, 2 * STEP - 1)
        answers += await results(server, run, requests)
        await until(lambda: loop._runs.copies.backlogs[run.id].seq == 2 * STEP - 1)
        engine.adapters.restore(run.id, stale)
        loop._runs.copies.backlogs[run.id] = debt_before
        answers += await results(server, run, await submit(server, run, 2 * STEP, 2 * STEP))
    assert answers == expected
    assert restored_digest(server, engine, run.id) == digest
