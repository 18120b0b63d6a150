"""Usage of tenants: counted once, by the hour, in the commit or resolve that publishes its result."""

from __future__ import annotations

import json
import time

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced, Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RunId, TenantId, encode
from cotrain_store.messages.ops import Result, RunUsage, SampleUsage, Step
from cotrain_store.monitoring.failures import Refusals, most_failures, recent_failures
from cotrain_store.tenants.lists import RunList
from tests.support.log import WORKER
from tests.support.samples import RESULT, Samples
from tests.support.stack import MODEL, POOL

HOUR_S = 3600 * 500_000


@pytest.fixture(autouse=True)
def fixed_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.usage.usage_hour", lambda _: HOUR_S)
    monkeypatch.setattr("cotrain_store.sampling.claims.usage_hour", lambda _: HOUR_S)
    monkeypatch.setattr("cotrain_store.weights.usage_hour", lambda _: HOUR_S)


def used(samples: Samples, tenant: str = "a") -> dict[str, float]:
    """Read a tenant's hour: amount by `what|run or sampler`."""
    rows = samples.log.redis.hgetall(redis_keys.usage(TenantId(tenant), HOUR_S))
    found = {}
    for field, amount in rows.items():
        what, model, session, user = field.decode().split("|")
        assert (model, session) == (MODEL, user.partition(":")[0])
        found[f"{what}|{user}"] = float(amount)
    return found


def commit(samples: Samples, step: Step, usage: dict[RunId, RunUsage]) -> None:
    results = {(op.run, op.seq): Result.of_json({}) for op in step.ops}
    samples.log.execution.commit(step, results, {}, {}, usage=usage)


async def test_training_is_counted_for_its_run_and_tenant(samples: Samples) -> None:
    ours, theirs = await samples.log.new_run("a"), await samples.log.new_run("b")
    step = await samples.log.plan()
    commit(samples, step, {ours.id: RunUsage(100, 0.25), theirs.id: RunUsage(7, 0.5)})
    assert used(samples, "a") == {f"training_tokens|{ours.id}": 100, f"device_s|{ours.id}": 0.25}
    assert used(samples, "b") == {f"training_tokens|{theirs.id}": 7, f"device_s|{theirs.id}": 0.5}
    await samples.log.submit(ours, 1)
    commit(samples, await samples.log.plan(), {ours.id: RunUsage(11, 0.5)})
    assert used(samples, "a")[f"training_tokens|{ours.id}"] == 111
    assert used(samples, "a")[f"device_s|{ours.id}"] == 0.75


async def test_a_commit_counts_once_and_a_replaced_worker_counts_nothing(samples: Samples) -> None:
    run = await samples.log.new_run()
    step = await samples.log.plan()
    for _ in range(2):
        commit(samples, step, {run.id: RunUsage(100, 0.25)})
    assert used(samples)[f"training_tokens|{run.id}"] == 100
    samples.new_worker()
    samples.log.redis.hset(redis_keys.open_steps(POOL, WORKER), step.cycle, encode(step))
    with pytest.raises(Fenced):
        commit(samples, step, {run.id: RunUsage(100, 0.25)})
    assert used(samples)[f"training_tokens|{run.id}"] == 100


async def test_sampling_is_counted_once_for_its_sampler_and_tenant(samples: Samples) -> None:
    sampler, theirs = await samples.sampler("a"), await samples.sampler("b")
    requests = await samples.submit(sampler, 0, 1)
    (foreign,) = await samples.submit(theirs, 0)
    samples.claim()
    usage = {
        requests[0]: SampleUsage(10, 4, 3, 0.5),
        requests[1]: SampleUsage(20, 0, 5, 0.25),
        foreign: SampleUsage(1, 0, 1),
    }
    for _ in range(2):
        samples.sampling.resolve(dict.fromkeys(usage, RESULT), {}, usage)
    assert used(samples, "a") == {
        f"prefill_tokens|{sampler.id}": 30,
        f"cached_tokens|{sampler.id}": 4,
        f"sampled_tokens|{sampler.id}": 8,
        f"device_s|{sampler.id}": 0.75,
    }
    assert used(samples, "b") == {f"prefill_tokens|{theirs.id}": 1, f"sampled_tokens|{theirs.id}": 1}


async def test_a_checkpoint_counts_when_it_is_stored(samples: Samples) -> None:
    run = await samples.log.new_run()
    await samples.save(run, 1, name="x")
    await samples.save(run, 2, sampler=0)
    assert used(samples) == {}
    for _ in range(2):
        samples.stored(run, 1)
        samples.stored(run, 2)
    assert used(samples) == {f"checkpoints|{run.id}": 1}


async def test_an_hour_is_kept_for_a_hundred_days(samples: Samples) -> None:
    run = await samples.log.new_run()
    commit(samples, await samples.log.plan(), {run.id: RunUsage(1, 0.1)})
    life_s = samples.log.redis.ttl(redis_keys.usage(TenantId("a"), HOUR_S))
    assert life_s == pytest.approx(100 * 24 * 3600, abs=60)


async def test_a_failed_op_counts_for_its_run_and_tenant_once(samples: Samples) -> None:
    ours, theirs = await samples.log.new_run("a"), await samples.log.new_run("b")
    step = await samples.log.plan()
    results = {
        (op.run, op.seq): Result.failed("x" + 400 * "ü", "user") if op.run == ours.id else Result.of_json({})
        for op in step.ops
    }
    for _ in range(2):
        samples.log.execution.commit(step, results, {}, {})
    connection = samples.log.connection
    (each,) = (await recent_failures(connection, time.time())).items()
    assert (each[0], each[1].failed, each[1].refused) == ("a", 1, 0)
    assert (each[1].message, each[1].request) == ("x" + 299 * "ü", f"{ours.id}:0")
    stored = samples.log.redis.hget(redis_keys.newest_failures(), "failed|a") or b""
    assert json.loads(stored)["message"] == each[1].message  # cut before a whole character
    assert 0 < samples.log.redis.ttl(redis_keys.newest_failures()) <= redis_keys.MINUTE_TTL_S
    assert await most_failures(connection, 9) == {POOL: [("a", 1)]}
    positions = await RunList(connection).positions([ours, theirs], time.time())
    assert [positions[run.id].failed for run in (ours, theirs)] == [1, 0]
    refusals = Refusals(connection)
    for _ in range(3):
        refusals.note(TenantId("b"), Refused(Reason.QUEUE_FULL))
    refusals.note(TenantId("b"), RunNotFound())  # the resource is missing
    await refusals.store()
    found = await recent_failures(connection, time.time())
    assert list(found) == ["b", "a"]
    assert (found[TenantId("b")].refused, found[TenantId("b")].message) == (3, Reason.QUEUE_FULL.message)
