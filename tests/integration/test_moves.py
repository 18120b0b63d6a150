"""Runs that leave their worker while they train, moved, drained or stopped: no failed request, the same bits, no replay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced, Reason, RunClosed
from cotrain_store.messages.fleet import Move
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.moves import Drains, Moves
from cotrain_workers.engine.engine import Engine
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import LORA, PROGRAM, results, submit, undisturbed
from tests.support.refusals import refused
from tests.support.sampling import ended, submit_sample, submit_save
from tests.support.stack import NEW, OLD, POOL, Stack, heartbeat, is_listed, snapshots, worker
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("heartbeats_are_quick")

#: Ops of one step of the program.
STEP = 4


def owner(redis: Any, run: RunRecord) -> str:
    return str(redis.hget(redis_keys.log(POOL, run.id), "worker").decode())


def moves_and_owners(redis: Any, runs: Sequence[RunRecord]) -> tuple[int, list[str]]:
    """Count the moves so far, and say whose each run is: at one moment, as runs are moved meanwhile."""
    with redis.pipeline(transaction=True) as asked:
        asked.hget(redis_keys.counters(POOL), "moves")
        for run in runs:
            asked.hget(redis_keys.log(POOL, run.id), "worker")
        moved, *owners = asked.execute()
    return int(moved or 0), [(owner or b"").decode() for owner in owners]  # none has one at first


async def test_a_run_that_is_moved_there_and_back_in_mid_training_replays_nothing(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    moves = Moves(server.connection)
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1000)), ExitStack() as second:
        answers = await results(server, run, await submit(server, run, 1, 2))
        with refused(Reason.CANNOT_MOVE, match="is already on worker w0"):
            await moves.request(POOL, run.id, OLD)
        with refused(Reason.WORKER_NOT_FOUND):
            await moves.request(POOL, run.id, NEW)
        second.enter_context(worker(server, other, worker_id=NEW, tuning=snapshots(ops=1000)))
        await until(lambda: heartbeat(redis, NEW))
        under_way = await submit(server, run, 3, STEP + 2)
        await moves.request(POOL, run.id, NEW)  # an optimizer step and a gradient that waits lie before it
        answers += await results(server, run, under_way)
        await until(lambda: owner(redis, run) == NEW)
        assert (await server.dispatch.view(POOL)).moves == []
        assert run.id not in engine.adapters
        under_way = await submit(server, run, STEP + 3, 2 * STEP)
        answers += await results(server, run, under_way)
        assert run.id in other.adapters
        await moves.request(POOL, run.id, OLD)
        under_way = await submit(server, run, 2 * STEP + 1, len(PROGRAM))
        answers += await results(server, run, under_way)
        await until(lambda: owner(redis, run) == OLD)
        await moves.request(POOL, run.id, NEW)
        await until(lambda: owner(redis, run) == NEW)
        assert heartbeat(redis, OLD)["restored_ops"] == heartbeat(redis, NEW)["restored_ops"] == 0
    assert answers == expected
    assert redis.hget(redis_keys.counters(POOL), "moves") == b"3"
    assert redis.hget(redis_keys.counters(POOL), "replayed_ops") in (None, b"0")
    with worker(server, other, worker_id=NEW):
        await results(server, run, [await server.optim_step(run, len(PROGRAM) + 1)])
    assert digest


@pytest.mark.parametrize(
    "failpoint",
    [
        variant(Failpoint("moves.hand_over")),
        Failpoint("moves.hand_over", after=True),
        Failpoint("register_snapshot"),
        variant(Failpoint("register_snapshot", after=True)),
    ],
    ids=str,
)
async def test_wherever_its_owner_dies_the_run_goes_on_with_the_same_numbers(
    server: Stack, engine: Engine, other: Engine, redis: Any, failpoint: Failpoint
) -> None:
    moves = Moves(server.connection)
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    with ExitStack() as second:
        async with dying_worker(server, engine, failpoint, tuning=snapshots(ops=1000)):
            answers = await results(server, run, await submit(server, run, 1, STEP))
            second.enter_context(worker(server, other, worker_id=NEW))
            await until(lambda: heartbeat(redis, NEW))
            await moves.request(POOL, run.id, NEW)
            under_way = await submit(server, run, STEP + 1, len(PROGRAM))
        engine.adapters.drop(run.id)
        with worker(server, engine):
            answers += await results(server, run, under_way)
            await until(lambda: redis.hlen(redis_keys.moves(POOL)) == 0)
    assert answers == expected
    states = [each.adapters.state(run.id).digest() for each in (engine, other) if run.id in each.adapters]
    assert digest in states


async def test_only_its_owner_hands_a_run_over_and_only_with_nothing_planned(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    moves = Moves(server.connection)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=1000)) as loop:
        await results(server, run, await submit(server, run, 1, STEP))
        with worker(server, other, worker_id=NEW):
            await until(lambda: heartbeat(redis, NEW))
            own, epoch, move = loop._execution.moves, loop._execution.epoch, Move(run.id, OLD, NEW)
            assert not own.hand_over(move, epoch, in_memory=False)  # it is not wanted
            loop._move_runs = lambda: None  # type: ignore[assignment]  # the test does it
            await moves.request(POOL, run.id, NEW)
            with pytest.raises(Fenced):
                own.hand_over(move, epoch - 1, in_memory=False)
            assert not own.hand_over(move, epoch, in_memory=True)  # no copy holds all of it
            log = redis_keys.log(POOL, run.id)
            after = int(redis.hget(log, "next"))
            redis.hset(log, "next", after + 1)  # as while an op of it is planned
            assert not own.hand_over(move, epoch, in_memory=False)
            redis.hset(log, "next", after)
            assert owner(redis, run) == OLD
            assert own.hand_over(move, epoch, in_memory=False)
            assert not own.hand_over(move, epoch, in_memory=False)
            assert owner(redis, run) == NEW
            assert not await server.dispatch.request_move(POOL, run.id, OLD)  # not twice in ten minutes
            await server.intake.close_run(run)
            with pytest.raises(RunClosed):
                await moves.request(POOL, run.id, OLD)


async def test_a_run_goes_on_where_it_is_when_its_target_is_gone(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    moves = Moves(server.connection)
    run = await server.create("a", "a", LORA)
    with worker(server, engine) as loop:
        await results(server, run, await submit(server, run, 1, STEP))
        move_runs = loop._move_runs
        loop._move_runs = lambda: None  # type: ignore[assignment]  # later
        with worker(server, other, worker_id=NEW):
            await until(lambda: heartbeat(redis, NEW))
            await moves.request(POOL, run.id, NEW)
        loop._move_runs = move_runs
        await results(server, run, await submit(server, run, STEP + 1, 2 * STEP))
        await until(lambda: redis.hlen(redis_keys.moves(POOL)) == 0)
    assert owner(redis, run) == OLD


async def test_of_eight_runs_on_one_worker_some_go_to_a_second_that_joins_and_none_goes_twice(
    server: Stack, engine: Engine, other: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_scheduler.placement.LASTS_S", 0.5)
    monkeypatch.setattr("cotrain_scheduler.placement.DIFFERENCE_S", 2.0)
    monkeypatch.setattr("cotrain_scheduler.placement.REST_S", 2.0)
    runs = [await server.create(f"t{number}", f"s{number}", LORA) for number in range(8)]
    with worker(server, engine), ExitStack() as second:
        moved, owners = moves_and_owners(redis, runs)
        for round_ in range(60):
            seq = round_ * STEP
            sent = [await submit(server, run, 1, STEP, place=seq + 1) for run in runs]
            for run, requests in zip(runs, sent, strict=True):
                await results(server, run, requests)
            if round_ == 2:
                second.enter_context(worker(server, other, worker_id=NEW))
            moved, owners = moves_and_owners(redis, runs)
            if set(owners) == {OLD, NEW}:
                break
        assert set(owners) == {OLD, NEW}
        assert moved == owners.count(NEW)


async def test_a_worker_is_drained_while_its_runs_train_and_returns(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    drains = Drains(server.connection)
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        answers = await results(server, run, await submit(server, run, 1, STEP))
        with worker(server, other, worker_id=NEW):
            await until(lambda: heartbeat(redis, NEW))
            under_way = await submit(server, run, STEP + 1, 2 * STEP)
            await drains.request(POOL, OLD)
            await drains.request(POOL, OLD)
            answers += await results(server, run, under_way)
            await until(lambda: not is_listed(redis, OLD))
            after = await submit(server, run, 2 * STEP + 1, len(PROGRAM))
            answers += await results(server, run, after)
            assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()
            assert heartbeat(redis, OLD)["state"] == "drained"
            assert heartbeat(redis, OLD)["runs"] == 0
            assert run.id not in engine.adapters
            assert await drains.withdraw(POOL, OLD)
            await until(lambda: is_listed(redis, OLD))
            await until(lambda: heartbeat(redis, OLD)["state"] == "serving")
    assert answers == expected
    assert other.adapters.state(run.id).digest() == digest


async def test_a_single_worker_keeps_its_runs_until_another_one_starts(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    drains = Drains(server.connection)
    with refused(Reason.WORKER_NOT_FOUND):
        await drains.request(POOL, OLD)
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await results(server, run, await submit(server, run, 1, 1))
        await drains.request(POOL, OLD)
        await until(lambda: heartbeat(redis, OLD)["state"] == "draining")
        save = await submit_save(server, run, 2)
        await server.result(run, save)
        assert not heartbeat(redis, OLD)["is_handing_over"]
        sampler = await server.records.sampler(run.tenant, "a:sample:0")
        await ended(server, sampler, await submit_sample(server, sampler, 1))
        with worker(server, other, worker_id=NEW):
            await until(lambda: not is_listed(redis, OLD))
            await ended(server, sampler, await submit_sample(server, sampler, 2))
            assert redis.hkeys(redis_keys.draining(POOL)) == [OLD.encode()]
        # The other worker is gone: the draining one continues, so that its pool need not wait.
        await until(lambda: is_listed(redis, OLD))
        await server.result(run, await server.optim_step(run, 3))


async def test_a_drained_worker_that_starts_again_stays_drained(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    with worker(server, other, worker_id=NEW):
        await until(lambda: heartbeat(redis, NEW))
        redis.hset(redis_keys.draining(POOL), OLD, "1.0")
        with worker(server, engine):
            await until(lambda: heartbeat(redis, OLD) and not is_listed(redis, OLD))
            run = await server.create("a", "a", LORA)
            await results(server, run, await submit(server, run, 1, 1))
            assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()


async def test_its_runs_go_on_elsewhere_at_once_and_nothing_is_replayed(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    with ExitStack() as old, worker(server, other, worker_id=NEW):
        redis.hset(redis_keys.draining(POOL), NEW, "1.0")  # else the run might begin there
        old.enter_context(worker(server, engine))
        await until(lambda: not is_listed(redis, NEW))
        answers = await results(server, run, await submit(server, run, 1, STEP))
        assert redis.hget(redis_keys.log(POOL, run.id), "worker") == OLD.encode()
        redis.hdel(redis_keys.draining(POOL), NEW)
        await until(lambda: heartbeat(redis, NEW)["state"] == "serving" and is_listed(redis, NEW))
        under_way = await submit(server, run, STEP + 1, 2 * STEP)
        await asyncio.to_thread(old.close)
        assert not is_listed(redis, OLD)
        assert not heartbeat(redis, OLD)
        answers += await results(server, run, under_way)
        after = await submit(server, run, 2 * STEP + 1, len(PROGRAM))
        answers += await results(server, run, after)
        assert redis.hget(redis_keys.log(POOL, run.id), "worker") == NEW.encode()
        assert heartbeat(redis, NEW)["restored_ops"] == 0
    assert answers == expected
    assert other.adapters.state(run.id).digest() == digest
    assert redis.hget(redis_keys.counters(POOL), "reassignments") is None


async def test_alone_it_says_that_it_drains_and_keeps_its_runs_for_its_next_process(
    server: Stack, engine: Engine, redis: Any
) -> None:
    seen = []
    run = await server.create("a", "a", LORA)
    with worker(server, engine) as loop:
        await results(server, run, await submit(server, run, 1, STEP))
        drain = loop._runs.copies.drain

        def look_and_drain(deadline_s: float) -> None:
            seen.append(heartbeat(redis, OLD))
            drain(deadline_s)

        loop._runs.copies.drain = look_and_drain  # type: ignore[method-assign]  # the real one, watched
    (last,) = seen
    assert (last["state"], last["is_handing_over"]) == ("draining", True)
    assert is_listed(redis, OLD)
    waiting = await submit(server, run, STEP + 1, 2 * STEP)
    with worker(server, engine):
        await results(server, run, waiting)
        await until(lambda: heartbeat(redis, OLD)["state"] == "serving")
        assert heartbeat(redis, OLD)["restored_ops"] == 0


async def test_workers_that_all_leave_find_their_runs_again(
    server: Stack, engine: Engine, other: Engine, redis: Any
) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine), worker(server, other, worker_id=NEW):
        await results(server, run, await submit(server, run, 1, STEP))
    waiting = await submit(server, run, STEP + 1, 2 * STEP)
    with worker(server, engine), worker(server, other, worker_id=NEW):
        await results(server, run, waiting)
        await until(lambda: heartbeat(redis, OLD) and heartbeat(redis, NEW))
        assert heartbeat(redis, OLD)["restored_ops"] + heartbeat(redis, NEW)["restored_ops"] == 0
