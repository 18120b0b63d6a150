"""Usage of tenants: counted once, in the commit that publishes a result, and shown over HTTP; a worker's device time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced, Reason, Refused, RunNotFound
from cotrain_store.messages.ids import PoolId, RunId, TenantId, encode
from cotrain_store.messages.ops import Result, RunUsage, SampleUsage, Step
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.monitoring.failures import Refusals, most_failures, recent_failures
from cotrain_store.monitoring.fleet import pool_status
from cotrain_store.monitoring.recent_activity import TOP_MINUTES, busiest_tenants, cycle_records
from cotrain_store.redis_client.connection import SyncConnection, open_connection
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.run_list import RunList
from cotrain_store.usage import minute_of
from cotrain_workers.engine.engine import Engine
from tests.support import http_api
from tests.support.bodies import sequences
from tests.support.http_api import ALICE, BOB, Api, pass_body, sample_body
from tests.support.log import WORKER
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import RESULT, Samples
from tests.support.stack import MODEL, POOL, Stack, make_worker
from tests.support.stand_in import DEVICE_S, FILES, StandIn

HOUR_S = 3600 * 500_000


@pytest.fixture
def samples(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> Samples:
    """Sample requests within one hour."""
    monkeypatch.setattr("cotrain_store.usage.usage_hour", lambda _: HOUR_S)
    monkeypatch.setattr("cotrain_store.sampling.claims.usage_hour", lambda _: HOUR_S)
    monkeypatch.setattr("cotrain_store.weights.usage_hour", lambda _: HOUR_S)
    return samples


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
    results = {op.id: Result.of_json({}) for op in step.ops}
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
        op.id: Result.failed("x" + 400 * "ü", "user") if op.run == ours.id else Result.of_json({}) for op in step.ops
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
        refusals.record(TenantId("b"), Refused(Reason.QUEUE_FULL))
    refusals.record(TenantId("b"), RunNotFound())  # the resource is missing
    await refusals.store()
    found = await recent_failures(connection, time.time())
    assert list(found) == ["b", "a"]
    assert (found[TenantId("b")].refused, found[TenantId("b")].message) == (3, Reason.QUEUE_FULL.message)
    assert found[TenantId("b")].status == 429


HOUR = timedelta(hours=1)


async def got(api: Api, path: str, key: str = ALICE, **params: str) -> Any:
    answer = await api.http.get(f"/api/v1/{path}", headers={"X-API-Key": key}, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def train(api: Api, worker: StandIn, key: str = ALICE) -> str:
    """Run a pass of 3 tokens and a save. Return the run's id."""
    run = await api.new_run(key)
    await api.post("forward_backward", pass_body(run, 1), key)
    await api.post("save_weights", {"model_id": run, "seq_id": 2, "path": "a"}, key)
    await worker.run_log()
    return run


async def sample(api: Api, worker: StandIn) -> str:
    """Sample once: 10 prompt tokens, 4 of them cached, and 2 generated ones.

    Return the sampler's id.
    """
    sampler = await api.new_sampler()
    await api.post("asample", sample_body(sampler, 0))
    (claimed,) = worker.claim()
    worker.finish(claimed.request, [1, 2], usage=SampleUsage(10, 4, 2, 0.5))
    return sampler


def window() -> dict[str, str]:
    """Return a window of the current hour and its neighbours, because the hour may end during the
    test."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    times = {"starting_on": now - HOUR, "ending_before": now + 2 * HOUR}
    return {name: time.isoformat().replace("+00:00", "Z") for name, time in times.items()}


async def test_usage_is_reported_by_hour_and_session(api: Api, worker: StandIn) -> None:
    run, sampler = await train(api, worker), await sample(api, worker)
    await train(api, worker, BOB)
    body = await got(api, "billing/usage/events", **window())
    told = {
        (event["session_id"], event["event_info"]["type"], event["event_info"].get("cached")): event
        for event in body["data"]
    }
    trained, sampled = run.partition(":")[0], sampler.partition(":")[0]
    amounts = {
        name: event["event_info"].get("token_count", event["event_info"].get("count")) for name, event in told.items()
    }
    assert amounts == {
        (trained, "training", None): 3,
        (trained, "checkpoint", None): 1,
        (sampled, "sampling_prefill", False): 6,
        (sampled, "sampling_prefill", True): 4,
        (sampled, "sampling_sample", None): 2,
    }
    assert {event["base_model"] for event in body["data"]} == {http_api.POOL.base_model}
    assert {event["estimated_cost_usd"] for event in body["data"]} == {None}
    assert body["sessions"].keys() == {trained, sampled}


async def test_an_invalid_window_is_a_bad_request(api: Api) -> None:
    body = {"starting_on": "2026-07-13T00:30:00Z", "ending_before": "2026-07-13T01:00:00Z"}
    for path in ("billing/usage/events", "usage"):
        answer = await api.http.get(f"/api/v1/{path}", headers={"X-API-Key": ALICE}, params=body)
        assert answer.status_code == 400
        assert "a full UTC hour" in answer.json()["detail"]


async def test_our_own_usage_contains_the_device_time_of_each_run(api: Api, worker: StandIn) -> None:
    run, sampler = await train(api, worker), await sample(api, worker)
    body = await got(api, "usage")
    by_source = {source["source"]: source["amounts"] for source in body["sources"]}
    assert by_source.keys() == {run, sampler}
    assert by_source[run]["device_s"] == DEVICE_S
    assert by_source[sampler]["device_s"] == 0.5
    assert body["total"]["device_s"] == sum(amounts["device_s"] for amounts in by_source.values())
    assert (body["total"]["training_tokens"], body["total"]["prefill_tokens"]) == (3, 10)
    asked = window()
    assert await got(api, "usage", **asked) == body | asked


async def test_half_a_window_is_rejected(api: Api) -> None:
    answer = await api.get("usage?starting_on=2026-07-13T00:00:00Z")
    assert answer.status_code == 400
    assert "needed together" in answer.json()["detail"]


async def test_current_storage_is_reported_by_project(api: Api, worker: StandIn) -> None:
    run = await train(api, worker)
    await train(api, worker)
    session, headers = run.partition(":")[0], {"X-API-Key": ALICE}
    await api.http.put(f"/api/v1/sessions/{session}/project", headers=headers, json={"project_id": "nightly"})
    size = FILES[1]
    items = (await got(api, "billing/usage/checkpoints/current"))["data"]
    told = [(item["project_id"], item["checkpoint_count"], item["size_bytes"]) for item in items]
    assert told == [(None, 1, size), ("nightly", 1, size)]
    assert items[0]["size_gigabytes"] == size / 1e9
    (only,) = (await got(api, "billing/usage/checkpoints/current", project_id="nightly"))["data"]
    assert only == items[1]
    assert await got(api, "billing/usage/checkpoints/current", BOB) == {
        "effective_rate_usd_per_gigabyte_month": None,
        "data": [],
    }


async def test_the_audit_log_lists_a_day_of_one_tenant_by_resource(api: Api, worker: StandIn) -> None:
    run = await train(api, worker)
    checkpoint = f"training_runs/{run}/checkpoints/weights/a"
    await api.post(f"{checkpoint}/publish")
    session = {"session_id": run.partition(":")[0], "project_id": "p"}
    tenant = await api.services.tenants.authenticate(ALICE)
    async with api.services.audit.act(tenant, AuditEvent.PROJECT_ASSIGN, session):
        pass
    everything = (await got(api, "audit"))["entries"]
    assert [entry["event"] for entry in everything] == ["checkpoint_publish", "project_assign"]
    assert everything[0]["tinker_path"] == f"tinker://{run}/weights/a"
    key = {"key_id": tenant.key_id, "key_name": tenant.name}
    assert everything[1]["event_details"] == session | key
    assert everything[0]["event_details"]["key_id"] == tenant.key_id
    assert (await got(api, "audit", event_type="checkpoints"))["entries"] == everything[:1]
    assert (await got(api, "audit", event_type="teams"))["entries"] == []
    assert (await got(api, "audit", BOB))["entries"] == []


async def test_a_day_of_the_audit_log_ends_at_midnight(api: Api) -> None:
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    day = datetime(2026, 7, 13, tzinfo=UTC)
    for name, at in (
        ("before", day - HOUR),
        ("on", day),
        ("still", day + 24 * HOUR - timedelta(milliseconds=1)),
        ("after", day + 24 * HOUR),
    ):
        row = {"event": name, "details": "{}"}
        await api.services.connection.xadd(redis_keys.audit(tenant), row, id=f"{int(at.timestamp() * 1000)}-7")
    entries = (await got(api, "audit", day="2026-07-13"))["entries"]
    assert [entry["event"] for entry in entries] == ["on", "still"]
    for day_of_no_time in ("0001-01-01", "9999-12-31"):
        assert (await got(api, "audit", day=day_of_no_time))["entries"] == []


POOLS = [PoolId("p"), PoolId("q")]


async def test_the_busiest_tenants_of_all_pools_come_first(empty_redis: EmbeddedRedis, redis: SyncConnection) -> None:
    now = time.time()
    for pool, back, counts in (
        ("p", 0, {"cycles": 2, "tokens|t-a": 900, "device_s|t-a": 0.5, "device_s|t-b": 2}),
        ("p", 1, {"device_s|t-a": 1.25}),
        ("q", 1, {"device_s|t-c": 0.25, "device_s|t-a": 1}),
        ("p", TOP_MINUTES, {"device_s|t-d": 60}),
    ):
        minute = redis_keys.minute(PoolId(pool), minute_of(now) - 60 * back)
        redis.hset(minute, mapping=counts)
    connection = open_connection(empty_redis.url)
    try:
        assert await busiest_tenants(connection, POOLS, now, 2) == [("t-a", 2.75), ("t-b", 2.0)]
        assert await busiest_tenants(connection, [], now, 2) == []
    finally:
        await connection.aclose()


async def test_the_phases_add_up_to_the_lifetime_of_the_worker(server: Stack, engine: Engine) -> None:
    loop, opened = make_worker(server, engine)
    began = loop._device_time._lap_at
    ended: list[float] = []

    def live() -> None:
        loop.run()
        # measured here, because the delay until another thread notices does not count
        ended.append(time.monotonic())

    thread = threading.Thread(target=live)
    thread.start()
    run = await server.create("a", "s", LoraSpec(rank=4, seed=0))
    for step in range(20):  # longer than a thread may have to wait for a core
        await server.forward_backward(run, 2 * step + 1, sequences(1, 8, 100))
        await server.result(run, await server.optim_step(run, 2 * step + 2))
    records = await cycle_records(server.connection, POOL, 100)
    heartbeat = (await pool_status(server.connection, POOL)).workers[0]
    loop.stop()
    await asyncio.to_thread(thread.join)
    opened.close()
    booked = loop._device_time.seconds
    assert sum(booked.values()) == pytest.approx(ended[0] - began, rel=0.02)
    computed_s = sum(record["wave_ms"] + record["optim_ms"] for record in records) / 1000
    assert booked["train"] + booked["optim"] >= computed_s * 0.98
    assert 0 < booked["optim"] < booked["train"]
    assert heartbeat.device_seconds.keys() == booked.keys()
    assert all(heartbeat.device_seconds[phase] <= booked[phase] for phase in booked)
