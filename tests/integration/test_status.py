"""Status of pools, tenants, workers and Redis for operators."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cotrain_scheduler.scaling import Demand, demand_of, workers_needed
from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import Pause, Pauses, Scaling, WorkerExit, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.fleet import QueueStatus, pool_status, read_fleet, read_pools, redis_status
from cotrain_store.monitoring.recent_activity import cycle_records
from cotrain_store.monitoring.worker_exits import record_silent_exit, recorded_exit, store_exit
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.tenants.policies import PauseRecords
from tests.support.log import WORKER, Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import Samples
from tests.support.stack import POOL, pool_record_for_tests


async def test_an_empty_pool_has_a_status(log: Log) -> None:
    status = await pool_status(log.connection, POOL)
    assert (status.workers, status.workers_known) == ((), 1)
    assert (status.open_cycles, status.last_cycle, status.queues) == (0, 0, ())
    assert (status.oldest_ready_s, status.oldest_gap_s, status.counters) == (0.0, 0.0, {})


async def test_the_last_exit_of_a_worker_is_stored_for_the_pages(log: Log, empty_redis: EmbeddedRedis) -> None:
    model = pool_record_for_tests().base_model
    last = WorkerExit(20.0, 4, "There is no such folder.", since=10.0)
    await store_exit(empty_redis.url, model, WORKER, last)
    await store_exit("redis://127.0.0.1:1/0", model, WORKER, last)  # without Redis
    (worker,) = (await pool_status(log.connection, POOL)).ids
    assert worker.last_exit == last
    assert worker.last_exit.text == "restarted 4 times, last reason: There is no such folder."


async def test_a_worker_without_a_supervisor_stores_its_exits(log: Log) -> None:
    model = pool_record_for_tests().base_model

    async def last_exit() -> WorkerExit | None:
        (worker,) = (await pool_status(log.connection, POOL)).ids
        return worker.last_exit

    record_silent_exit(log.redis, model, WORKER, None)  # the predecessor left in order
    assert await last_exit() is None
    last: WorkerExit | None = None
    for expected in (1, 2):
        with pytest.raises(ValueError, match="broken"), recorded_exit(log.redis, model, WORKER):
            raise ValueError("broken")
        last = await last_exit()
        assert last is not None
        assert (last.count, last.reason) == (expected, "ValueError: broken")
    assert last is not None
    beat = WorkerHeartbeat(WORKER, 1, "serving", "cpu", 1e5, 2, 10, last.at - 1)
    record_silent_exit(log.redis, model, WORKER, beat)  # of the process whose exit is stored
    assert await last_exit() == last
    record_silent_exit(log.redis, model, WORKER, replace(beat, seen_at=last.at + 1))
    silent = await last_exit()
    assert silent is not None
    assert (silent.count, silent.since) == (3, last.since)
    assert "SIGKILL" in silent.reason


async def test_a_pools_status_counts_what_waits_and_what_runs(log: Log) -> None:
    first, second = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    await log.submit(first, 1, tokens=5, body=b"12345")
    await log.plan()
    await log.submit(first, 2, tokens=6, body=b"123456")
    await log.submit(second, 3)
    log.redis.zadd(redis_keys.ready(POOL), {first.id: (time.time() - 5_000) * 1000})
    log.redis.zadd(redis_keys.gaps(POOL), {second.id: (time.time() - 7_000) * 1000})
    beat = WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 2, 10, time.time())
    log.execution.heartbeat(beat)

    status = await pool_status(log.connection, POOL)
    assert status.workers == (beat,)
    assert (status.open_cycles, status.last_cycle) == (1, 2)
    assert status.queues == (QueueStatus(first.tenant, 2, 11, 11), QueueStatus(second.tenant, 1, 7, 4))
    assert 5_000 <= status.oldest_ready_s < 6_000
    assert 7_000 <= status.oldest_gap_s < 8_000
    assert status.oldest_gap_run == second.id
    assert status.counters == {"cycles": 1.0, "runs_made": 2.0}


def listed(log: Log) -> list[str]:
    """Return the tenants in the pool's list, and those with counters."""
    counters = (redis_keys.queue, redis_keys.sample_load)
    kept = [key for of in counters for key in log.redis.keys(of(POOL, TenantId("*")))]
    names = {name.decode() for name in log.redis.smembers(redis_keys.queue_tenants(POOL))}
    return sorted(names | {key.decode().rpartition(":")[2] for key in kept})


async def test_a_tenant_is_listed_while_it_has_waiting_or_running_work(samples: Samples) -> None:
    log = samples.log
    sampler, run = await samples.sampler("a"), await log.new_run("a")
    ended = await log.new_run("b")
    assert listed(log) == ["a", "b"]
    await log.intake.close_run(ended)
    assert listed(log) == ["a"]
    (request,) = await samples.submit(sampler, 0)
    await log.run_all()
    assert listed(log) == ["a"]
    samples.claim()
    samples.resolve(request)
    assert listed(log) == []
    await log.submit(run, 2)
    assert (await pool_status(log.connection, POOL)).queues == (QueueStatus(run.tenant, 1, 7, 4),)
    (of_c,) = await read_pools(log.connection, TenantId("c"))
    assert of_c.queues == (QueueStatus(TenantId("c"), 0, 0, 0),)
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert listed(log) == []  # failed ops count in no queue …
    await log.submit(run, 1)
    assert log.queued() == (2, 7, 4 + len(log.redis.hget(redis_keys.bodies(POOL, run.id), 2)))  # … until they may run
    await log.run_all()
    assert listed(log) == []


async def test_which_pools_have_workers_is_read_from_heartbeats_alone(log: Log) -> None:
    log.redis.set(redis_keys.queue_tenants(POOL), "whoever reads this fails")
    (pool,) = await read_pools(log.connection, with_queues=False)
    assert not pool.has_worker
    log.execution.heartbeat(WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 0, 0, 0.0))
    (pool,) = await read_pools(log.connection, with_queues=False)
    assert (pool.record.id, pool.has_worker) == (POOL, True)


async def test_sample_requests_are_counted_by_tenant(samples: Samples) -> None:
    await samples.submit(await samples.sampler("a"), 0, 1, 2)
    await samples.submit(await samples.sampler("b"), 0)
    samples.claim(2)
    status = await pool_status(samples.log.connection, POOL)
    assert status.queues == (
        QueueStatus(TenantId("a"), 0, 0, 0, samples_waiting=2, samples_running=1, sample_tokens=21),
        QueueStatus(TenantId("b"), 0, 0, 0, samples_waiting=0, samples_running=1, sample_tokens=7),
    )


async def test_a_worker_without_heartbeat_is_known_and_not_alive(log: Log) -> None:
    log.execution.heartbeat(WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 0, 0, 0.0))
    beats = [slot.heartbeat for slot in (await log.dispatch.view(POOL)).slots]
    assert [beat.id for beat in beats if beat] == [WORKER]
    assert 0 < log.redis.pttl(redis_keys.worker(POOL, WORKER)) <= redis_keys.WORKER_HEARTBEAT_TTL_MS
    log.execution.leave()
    status = await pool_status(log.connection, POOL)
    assert (status.workers, status.workers_known) == ((), 1)
    assert (await log.dispatch.view(POOL)).slots == [WorkerSlot(WORKER, log.execution.epoch, None)]


async def test_a_heartbeat_of_another_version_is_read(log: Log) -> None:
    log.redis.set(
        redis_keys.worker(POOL, WORKER),
        '{"id":"w0","epoch":1,"state":"serving","device":"cpu","tokens_per_s":1.0,"runs":0,'
        '"memory_bytes":0,"seen_at":0.0,"a_field_of_tomorrow":[]}',
    )
    [slot] = (await log.dispatch.view(POOL)).slots
    assert slot.heartbeat is not None
    assert slot.heartbeat.id == WORKER
    assert (await pool_status(log.connection, POOL)).workers[0].epoch == 1


async def test_the_last_cycles_are_returned_newest_first(log: Log) -> None:
    run = await log.new_run()
    for seq in range(1, 5):
        await log.run_all()
        await log.submit(run, seq)
    assert [row["cycle"] for row in await cycle_records(log.connection, POOL, 3)] == [4, 3, 2]


async def test_redis_reports_its_state(log: Log) -> None:
    status = await redis_status(log.connection)
    assert (status.appendonly, status.appendfsync, status.aof_last_write_ok) == (True, "always", True)
    assert status.memory_bytes > 0
    assert status.version


async def test_the_scheduler_is_alive_while_it_holds_the_lease(log: Log) -> None:
    fleet = await read_fleet(log.connection)
    assert (fleet.has_scheduler, fleet.scheduler_epoch) == (True, log.dispatch.epoch)
    await log.dispatch.resign()
    assert not (await read_fleet(log.connection)).has_scheduler


async def test_the_queues_of_more_tenants_than_are_read_at_once_are_all_there(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.monitoring.fleet.TENANTS_AT_ONCE", 2)
    for number, name in enumerate(("a", "b", "c"), 1):
        run = await log.new_run(name)
        for seq in range(1, number):
            await log.submit(run, seq)
    queues = (await pool_status(log.connection, POOL)).queues
    assert [(each.tenant, each.ops) for each in queues] == [("a", 1), ("b", 2), ("c", 3)]


async def demand(log: Log, pauses: Pauses) -> Demand:
    paused_runs = await log.dispatch.paused_runs(POOL, pauses)
    return demand_of(await log.dispatch.status(POOL), pauses, paused_runs)


async def test_what_is_held_back_is_no_demand_for_workers(log: Log) -> None:
    first, second = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    await log.submit(first, 1, tokens=500)
    await log.submit(second, 1, tokens=70)
    whole = await demand(log, Pauses())
    assert (whole.runs, whole.tokens, whole.rates) == (2, 570, ())
    held = await demand(log, Pauses(tenants={first.tenant: Pause(0.0)}))
    assert (held.runs, held.tokens) == (1, 70)
    held = await demand(log, Pauses(runs={second.id: Pause(0.0, tenant=second.tenant)}))
    assert held.runs == 1
    everyone = Pauses({first.tenant: Pause(0.0)}, {second.id: Pause(0.0, tenant=second.tenant)})
    assert workers_needed(await demand(log, everyone)) == 0
    await log.plan()
    assert (await demand(log, Pauses())).runs == 1  # a step at work holds both
    scaling = Scaling(2, 5.0, 4.0)
    await log.dispatch.write_scaling(POOL, scaling)
    assert (await pool_status(log.connection, POOL)).scaling == scaling
    assert (await pool_status(log.connection, POOL)).workers_wanted(6.0) == 2
    # Long after, without a leading scheduler: the wanted number is the present one, or 1 if work is
    # waiting.
    assert (await pool_status(log.connection, POOL)).workers_wanted(600.0) == 1


async def test_paused_work_is_no_backlog(log: Log) -> None:
    first, second = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    await log.submit(first, 1, tokens=500)
    await log.submit(second, 1, tokens=70)
    rate = pool_record_for_tests().tokens_per_s
    assert (await pool_status(log.connection, POOL)).backlog_s == 570 / rate
    pauses = PauseRecords(log.connection)
    await pauses.pause_tenant(first.tenant)
    assert (await pool_status(log.connection, POOL)).backlog_s == 70 / rate
    await pauses.resume_tenant(first.tenant)
    assert (await pool_status(log.connection, POOL)).backlog_s == 570 / rate


async def test_a_replaced_scheduler_does_not_change_the_number_of_workers(log: Log) -> None:
    await log.dispatch.resign()
    successor = Dispatch(log.connection, "successor")
    await successor.lead()
    await successor.write_scaling(POOL, Scaling(2, 5.0, 4.0))
    with pytest.raises(Fenced):
        await log.dispatch.write_scaling(POOL, Scaling(9, 6.0, 4.0))
    assert (await pool_status(log.connection, POOL)).scaling == Scaling(2, 5.0, 4.0)
