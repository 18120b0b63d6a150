"""Usage and audit log over HTTP and a real Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ops import SampleUsage
from cotrain_store.tenants.audit_log import AuditEvent
from tests.support.http_api import ALICE, BOB, POOL, Api, pass_body, sample_body
from tests.support.stand_in import DEVICE_S, FILES, StandIn

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
    assert {event["base_model"] for event in body["data"]} == {POOL.base_model}
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
