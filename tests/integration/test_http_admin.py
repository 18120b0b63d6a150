"""Actions of operators, over HTTP and by command: effective at once, or rejected; recorded before they act."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner, Result

from cotrain.cli import command_line
from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from cotrain_store import redis_keys
from cotrain_store.errors import StoreUnavailable
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.tenants.audit_log import Audit
from tests.support.http_api import (
    ADMIN_KEY,
    ALICE,
    BOB,
    OPERATOR,
    POOL,
    Api,
    pass_body,
    publish_pool,
    running_api,
    sample_body,
)
from tests.support.lists import save
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import stand_in
from tests.support.ui import log_in, send
from tests.support.waiting import until_true

ADMIN = "/api/v1/admin/"
HOSTILE = "<img src=x onerror=alert(1)>"


async def ask(api: Api, method: str, path: str, json: Any = None, key: str = ADMIN_KEY) -> Any:
    """Send a request as the operator; a rejection fails the test."""
    answer = await raw(api, method, path, json, key)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


async def raw(api: Api, method: str, path: str, json: Any = None, key: str = ADMIN_KEY) -> httpx.Response:
    headers = {"X-API-Key": key}
    return await api.http.request(method, f"{ADMIN}{path}", json=json, headers=headers)


async def tenant_of(api: Api, key: str = ALICE) -> str:
    return (await api.services.tenants.authenticate(key)).id


async def test_a_limit_applies_at_once_in_a_second_process_and_can_be_reset(
    api: Api, empty_redis: EmbeddedRedis
) -> None:
    tenant = await tenant_of(api)
    async with running_api(empty_redis.url) as other:
        assert (await other.post("create_session", {})).status_code == 200
        shown = await ask(api, "PATCH", f"tenants/{tenant}", {"limits": {"sessions": 1}})
        quota = next(each for each in shown["quotas"] if each["name"] == "sessions")
        assert quota == {
            "name": "sessions", "limit": 1, "default": 10_000, "is_own": True, "used": 1,
        }  # fmt: skip

        async def is_refused() -> bool:
            return (await other.post("create_session", {})).status_code == 429

        await until_true(is_refused)
        assert (await other.post("create_session", {}, BOB)).status_code == 200
        await ask(api, "PATCH", f"tenants/{tenant}", {"limits": {"sessions": None}})

        async def is_taken() -> bool:
            return (await other.post("create_session", {})).status_code == 200

        await until_true(is_taken)


async def test_every_quota_can_be_set_and_an_invalid_one_is_named(api: Api) -> None:
    tenant = await tenant_of(api)
    own = dict.fromkeys(type(api.services.settings.quotas).model_fields, 7)
    shown = await ask(api, "PATCH", f"tenants/{tenant}", {"limits": own, "weight": 2.5})
    assert {each["name"]: each["limit"] for each in shown["quotas"]} == own
    assert shown["weight"] == 2.5
    assert (await api.services.quotas.of(tenant)).history_points == 7  # type: ignore[arg-type]
    for body, says in (
        ({"limits": {"ops": 0}}, "limits.ops: Input should be greater than or equal to 1"),
        ({"limits": {"ops": 10**16}}, f"limits.ops: Input should be less than or equal to {10**15}"),
        ({"limits": {"ops": "9"}}, "limits.ops: Input should be a valid integer"),
        ({"limits": {"ops": True}}, "limits.ops: Input should be a valid integer"),
        ({"limits": {"opps": 9}}, "limits.opps: There is no field of this name"),
        ({"weight": 11}, "weight: Input should be less than or equal to 10"),
        ({"weight": 0}, "weight: Input should be greater than or equal to 0.1"),
        ({"wait": 1}, "wait: There is no field of this name"),
    ):
        answer = await raw(api, "PATCH", f"tenants/{tenant}", body)
        assert answer.status_code == 422, body
        assert answer.json()["detail"].startswith(says), answer.text
    assert (await ask(api, "GET", f"tenants/{tenant}"))["weight"] == 2.5
    for foreign in ("t-none", "..%2F..", "%00", "x" * 300):
        assert (await raw(api, "PATCH", f"tenants/{foreign}", {})).status_code == 404


async def test_a_pause_is_shown_to_its_clients_and_ends(api: Api) -> None:
    tenant = await tenant_of(api)
    run, bobs, sampler = await api.new_run(), await api.new_run(BOB), await api.new_sampler()
    with stand_in(api.services) as worker:
        await worker.run_log()
        await ask(api, "POST", f"tenants/{tenant}/pause", {"reason": "the bill is open"})
        listed = await ask(api, "GET", "tenants")
        assert {each["id"]: each["paused"] and each["paused"]["reason"] for each in listed["tenants"]} == {
            tenant: "the bill is open", await tenant_of(api, BOB): None,
        }  # fmt: skip
        op = (await api.post("forward_backward", pass_body(run, 1))).json()["request_id"]
        sample = (await api.post("asample", sample_body(sampler, 0))).json()["request_id"]
        assert (await api.post("forward_backward", pass_body(bobs, 1), BOB)).status_code == 200

        async def is_said(request: str) -> bool:
            poll = await api.post("retrieve_future", {"request_id": request})
            assert poll.status_code == 408
            said = poll.json()
            return (said["queue_state"], said["queue_state_reason"]) == (
                "paused_capacity", "the operator has paused this tenant: the bill is open",
            )  # fmt: skip

        for request in (op, sample):
            await until_true(lambda request=request: is_said(request))  # type: ignore[misc]
        assert worker.claim() == []
        await ask(api, "POST", f"tenants/{tenant}/resume")
        (claimed,) = worker.claim()
        worker.finish(claimed.request, [1])
        await worker.run_log()
        for request in (op, sample):
            poll = await api.post("retrieve_future", {"request_id": request})
            assert poll.status_code == 200


async def test_a_run_can_be_paused_and_closed_only_through_its_tenant(api: Api) -> None:
    tenant, other, run = await tenant_of(api), await tenant_of(api, BOB), await api.new_run()
    for act in ("pause", "resume", "close"):
        body: dict[str, str] | None = {} if act == "pause" else None
        answer = await raw(api, "POST", f"tenants/{other}/runs/{run}/{act}", body)
        assert (answer.status_code, answer.json()["code"]) == (404, "run_not_found")
    await ask(api, "POST", f"tenants/{tenant}/runs/{run}/pause", {"reason": "too large"})
    shown = await ask(api, "GET", f"tenants/{tenant}")
    assert shown["paused_runs"][run]["reason"] == "too large"
    await ask(api, "POST", f"tenants/{tenant}/runs/{run}/resume")
    waits = (await api.post("forward_backward", pass_body(run, 1))).json()["request_id"]
    for _ in range(2):
        await ask(api, "POST", f"tenants/{tenant}/runs/{run}/close")
    failed = await api.post("retrieve_future", {"request_id": waits})
    assert failed.json()["category"] == "user"
    answer = await raw(api, "POST", f"tenants/{tenant}/runs/{run}/pause", {})
    assert (answer.status_code, answer.json()["code"]) == (400, "run_closed")
    long = await raw(api, "POST", f"tenants/{tenant}/runs/{run}/pause", {"reason": "x" * 201})
    assert long.json()["detail"] == "reason: String should have at most 200 characters."


async def test_a_key_is_shown_once_expires_is_listed_and_is_revoked(api: Api) -> None:
    made = await ask(api, "POST", "tenants", {"name": HOSTILE, "days": 2})
    tenant, key = made["tenant"], made["key"]
    assert made["name"] == HOSTILE
    assert made["not_after"] > made["created_at"]
    (listed,) = await ask(api, "GET", f"tenants/{tenant}/keys")
    assert "key" not in listed
    assert listed["last_used_at"] is None
    assert (await api.post("create_session", {}, key)).status_code == 200
    (listed,) = await ask(api, "GET", f"tenants/{tenant}/keys")
    assert listed["last_used_at"] >= made["created_at"] - 1
    foreign = await raw(api, "DELETE", f"tenants/{await tenant_of(api)}/keys/{made['id']}")
    assert (foreign.status_code, foreign.json()["code"]) == (404, "key_not_found")
    await ask(api, "DELETE", f"tenants/{tenant}/keys/{made['id']}")
    assert await ask(api, "GET", f"tenants/{tenant}/keys") == []
    assert (await api.post("create_session", {}, key)).status_code == 401
    for body, field in (
        ({"name": ""}, "name"), ({"name": "a\nb"}, "name"), ({"name": "x" * 65}, "name"),
        ({"name": "x", "days": 0}, "days"), ({"name": "x", "days": 1e9}, "days"),
        ({"name": "x", "role": "owner"}, "role"), ({}, "name"),
    ):  # fmt: skip
        answer = await raw(api, "POST", f"tenants/{tenant}/keys", body)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(f"{field}: "), answer.text


async def test_the_audit_log_names_the_key_of_every_action_page_by_page(api: Api) -> None:
    tenant, run = await tenant_of(api), await api.new_run()
    session = {"project_id": "p"}
    headers = {"X-API-Key": ALICE}
    path = f"/api/v1/sessions/{run.partition(':')[0]}/project"
    assert (await api.http.put(path, json=session, headers=headers)).status_code == 204
    await ask(api, "PATCH", f"tenants/{tenant}", {"weight": 3})
    await ask(api, "POST", f"tenants/{await tenant_of(api, BOB)}/pause", {})
    await ask(api, "POST", f"tenants/{tenant}/runs/{run}/close")
    mine = await ask(api, "GET", f"audit?tenant={tenant}&limit=2")
    assert [(each["event"], each["key_id"]) for each in mine["events"]] == [
        ("run_close", "operator"),
        ("tenant_weight", "operator"),
    ]
    rest = await ask(api, "GET", f"audit?tenant={tenant}&limit=2&before={mine['next']}")
    (assigned,) = rest["events"]
    key = await api.services.tenants.key(ALICE)
    assert (assigned["event"], assigned["key_id"], assigned["key_name"]) == (
        "project_assign", key.id, key.name,
    )  # fmt: skip
    assert rest["next"] is None
    everything = await ask(api, "GET", "audit")
    assert len(everything["events"]) == 4
    for query in ("before=x", "limit=0", "limit=1001"):
        assert (await raw(api, "GET", f"audit?{query}")).status_code == 422
    own = (await api.get("audit")).json()["entries"]
    assert [entry["event"] for entry in own] == ["project_assign", "tenant_weight", "run_close"]


async def test_tenants_are_listed_by_name_page_by_page_and_searched(api: Api) -> None:
    for name in ("delta", "Charlie", HOSTILE):
        await ask(api, "POST", "tenants", {"name": name})
    first = await ask(api, "GET", "tenants?limit=2")
    rest = await ask(api, "GET", "tenants?limit=9&offset=2")
    names = [each["name"] for page in (first, rest) for each in page["tenants"]]
    assert names == sorted(names, key=str.casefold)
    assert first["total"] == len(names) == 5
    found = await ask(api, "GET", "tenants?search=CHAR")
    assert [each["name"] for each in found["tenants"]] == ["Charlie"]
    assert OPERATOR["X-API-Key"] == ADMIN_KEY


async def test_a_run_is_moved_and_an_impossible_move_is_rejected(api: Api) -> None:
    tenant, run, redis = await tenant_of(api), await api.new_run(ALICE), api.services.connection
    path = f"tenants/{tenant}/runs/{run}/move"

    async def refused(worker: str) -> tuple[int, str]:
        answer = await raw(api, "POST", path, {"worker": worker})
        return answer.status_code, answer.json()["detail"]

    assert await refused("w1") == (404, "Worker not found.")
    for worker in ("w0", "w1"):
        await redis.sadd(redis_keys.workers(POOL.id), worker)
        await redis.set(redis_keys.worker(POOL.id, WorkerId(worker)), "{}")
    status, detail = await refused("w1")
    assert (status, "has no worker yet. Its next request assigns one" in detail) == (400, True)
    await redis.hset(redis_keys.log(POOL.id, RunId(run)), "worker", "w0")
    assert await refused("w0") == (400, f"Run {run} is already on worker w0.")
    status, detail = await refused("no worker")
    assert (status, detail.startswith("worker: ")) == (422, True)
    await ask(api, "POST", path, {"worker": "w1"})
    assert await redis.hgetall(redis_keys.moves(POOL.id)) == {run.encode(): b"w0>w1"}
    (event,) = [event for event in (await ask(api, "GET", "audit"))["events"] if event["event"] == "run_move"]
    assert event["details"] == {"run": run, "worker": "w1"}
    await ask(api, "POST", f"tenants/{tenant}/runs/{run}/close")
    assert (await refused("w1"))[0] == 400


OWN = {"X-API-Key": ALICE}
TENANT, RUN = "/api/v1/admin/tenants/{tenant}", "/api/v1/training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/weights/kept"
ACTS: list[tuple[Mapping[str, str], str, str, Any]] = [
    (OPERATOR, "POST", "/api/v1/admin/tenants", {"name": "new"}),
    (OPERATOR, "PATCH", TENANT, {"limits": {"ops": 7}}),
    (OPERATOR, "PATCH", TENANT, {"weight": 2.5}),
    (OPERATOR, "POST", TENANT + "/pause", {"reason": "x"}),
    (OPERATOR, "POST", TENANT + "/keys", {"name": "laptop"}),
    (OPERATOR, "DELETE", TENANT + "/keys/{key}", None),
    (OPERATOR, "POST", TENANT + "/runs/{run}/pause", {}),
    (OPERATOR, "POST", TENANT + "/runs/{paused}/resume", {}),
    (OPERATOR, "POST", TENANT + "/runs/{run}/close", {}),
    (OPERATOR, "POST", "/api/v1/admin/pools/{pool}/workers/w0/drain", {}),
    (OPERATOR, "POST", "/api/v1/admin/pools/{pool}/workers/w1/undrain", {}),
    (OWN, "POST", CHECKPOINT + "/publish", None),
    (OWN, "PUT", CHECKPOINT + "/ttl", {"ttl_seconds": 3600}),
    (OWN, "DELETE", CHECKPOINT, None),
    (OWN, "PATCH", RUN, {"note": "n"}),
    (OWN, "PUT", "/api/v1/sessions/{session}/project", {"project_id": "p"}),
    (OWN, "PUT", "/api/v1/webhook", {"url": "https://a.example/"}),
    (OWN, "DELETE", "/api/v1/webhook", None),
]


@pytest.fixture
async def site(empty_redis: EmbeddedRedis) -> AsyncIterator[tuple[Api, dict[str, str]]]:
    """A server with one of every object that can be changed, and the names of these objects."""
    async with running_api(empty_redis.url) as api:
        services = api.services
        tenant = (await services.tenants.authenticate(ALICE)).id
        with stand_in(services) as worker:
            run, paused = await api.new_run(), await api.new_run()
            await save(api, worker, run, "kept")
        laptop = await services.tenants.issue("old laptop", tenant=tenant)
        await services.pauses.pause_run(await services.records.run(tenant, paused))
        await services.webhooks.set(tenant, "https://b.example/")
        await services.connection.sadd(redis_keys.workers(POOL.id), "w0", "w1")
        await services.connection.hset(redis_keys.draining(POOL.id), "w1", "1.0")
        yield api, {
            "tenant": tenant, "run": run, "paused": paused, "pool": POOL.id,
            "session": run.partition(":")[0], "key": (await services.tenants.key(laptop)).id,
        }  # fmt: skip


def everything(url: str) -> dict[bytes, bytes]:
    """Copy the content of Redis, without the last uses of keys and the leases, which expire without a write."""
    with open_sync_connection(url) as redis:
        names = [name for name in sorted(redis.keys()) if b"last_use" not in name]
        return {name: redis.dump(name) for name in names if not name.endswith(b":lease")}


async def sent(api: Api, names: Mapping[str, str], act: tuple[Any, ...]) -> httpx.Response:
    headers, method, path, body = act
    return await api.http.request(method, path.format(**names), json=body, headers=headers)


async def test_an_action_whose_audit_line_cannot_be_written_is_not_done(
    site: tuple[Api, dict[str, str]], empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, names = site

    async def refuses(*_: object) -> list[bytes]:
        raise StoreUnavailable

    for act in ACTS:
        before = everything(empty_redis.url)
        with monkeypatch.context() as broken:
            broken.setattr(Audit, "_write", refuses)
            assert (await sent(api, names, act)).status_code == 503, act
        assert everything(empty_redis.url) == before, act
        known = len(await api.services.audit.page(None, None, 100))
        assert (await sent(api, names, act)).is_success, act
        assert everything(empty_redis.url) != before, act
        assert len(await api.services.audit.page(None, None, 100)) > known, act


@pytest.mark.parametrize(
    "act",
    [
        (OPERATOR, "POST", TENANT + "/resume", {}),
        (OPERATOR, "POST", TENANT + "/runs/{run}/resume", {}),
        (OPERATOR, "DELETE", TENANT + "/keys/unknown", None),
        (OPERATOR, "POST", "/api/v1/admin/pools/{pool}/workers/w9/drain", {}),
        (OPERATOR, "POST", "/api/v1/admin/pools/{pool}/workers/w0/undrain", {}),
        (OWN, "DELETE", RUN + "/checkpoints/weights/unknown", None),
        (OWN, "PUT", "/api/v1/sessions/unknown/project", {"project_id": "p"}),
    ],
    ids=lambda act: f"{act[1]}-{act[2]}",
)
async def test_a_rejected_or_ineffective_action_leaves_no_line(
    site: tuple[Api, dict[str, str]], act: tuple[Any, ...]
) -> None:
    api, names = site
    known = await api.services.audit.page(None, None, 100)
    await sent(api, names, act)
    assert await api.services.audit.page(None, None, 100) == known


async def test_pausing_a_run_that_has_ended_leaves_no_line(site: tuple[Api, dict[str, str]]) -> None:
    api, names = site
    await sent(api, names, (OPERATOR, "POST", TENANT + "/runs/{run}/close", {}))
    answer = await sent(api, names, (OPERATOR, "POST", TENANT + "/runs/{run}/pause", {}))
    assert answer.status_code == 400
    tenants_own = await api.services.audit.page(names["tenant"], None, 100)  # type: ignore[arg-type]
    for events in (await api.services.audit.page(None, None, 100), tenants_own):
        assert [event.event for event in events] == ["run_close"]


async def test_changes_by_forms_of_the_pages_are_audited_first_too(
    site: tuple[Api, dict[str, str]], empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, names = site
    await log_in(api.http, ALICE)
    fields = {"path": f"tinker://{names['run']}/weights/kept", "do": "publish"}
    before = everything(empty_redis.url)

    async def refuses(*_: object) -> list[bytes]:
        raise StoreUnavailable

    with monkeypatch.context() as broken:
        broken.setattr(Audit, "_write", refuses)
        assert (await send(api.http, "/ui/checkpoints", fields)).status_code == 503
    assert everything(empty_redis.url) == before
    assert (await send(api.http, "/ui/checkpoints", fields)).status_code == 303
    assert [event.event for event in await api.services.audit.page(None, None, 9)] == ["checkpoint_publish"]


@pytest.fixture
def server(empty_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Address and key of a server, as environment variables."""
    settings = ServerSettings.model_validate(
        {
            "redis_url": empty_redis.url, "data_dir": tmp_path, "disk_reserve_bytes": 0,
            "api_keys": (ALICE,), "admin_key": ADMIN_KEY,
        }
    )  # fmt: skip
    publish_pool(empty_redis.url, tmp_path)
    running = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_config=None))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    port = running.servers[0].sockets[0].getsockname()[1]
    yield {"COTRAIN_BASE_URL": f"http://127.0.0.1:{port}", "COTRAIN_ADMIN_KEY": ADMIN_KEY}
    running.should_exit = True
    thread.join()


def run(server: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(command_line([]), ["admin", *words], env=server)


def asked(server: dict[str, str], *words: str) -> Any:
    result = run(server, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_operator_runs_every_command(server: dict[str, str]) -> None:
    made = asked(server, "tenants", "create", "lab")
    tenant = made["tenant"]
    again = run(server, "keys", "create", tenant, "laptop", "--days", "1e-9")
    assert (again.stdout.startswith("tml-"), f"laptop, member of tenant {tenant}" in again.stderr) == (True, True)
    assert "expired" in " ".join(run(server, "keys", "list", tenant).stdout.split())
    (laptop,) = [key["id"] for key in asked(server, "keys", "list", tenant) if key["id"] != made["id"]]
    asked(server, "keys", "revoke", tenant, laptop)
    shown = asked(server, "tenants", "set", tenant, "--limit", "ops=7", "--weight", "2")
    assert (shown["weight"], shown["quotas"][0]["limit"]) == (2.0, 7)
    shown = asked(server, "tenants", "set", tenant, "--limit", "ops=default")
    assert not shown["quotas"][0]["is_own"]
    guest = asked(server, "keys", "create", tenant, "guest", "--role", "viewer", "--days", "1")
    asked(server, "keys", "revoke", tenant, made["id"])
    assert [key["id"] for key in asked(server, "keys", "list", tenant)] == [guest["id"]]
    asked(server, "tenants", "pause", tenant, "--reason", "[red]why[/]")
    assert "paused: [red]why[/]" in run(server, "tenants", "show", tenant).output
    asked(server, "tenants", "resume", tenant)
    assert asked(server, "workers", "list")["workers"][0]["state"] == "away"
    asked(server, "workers", "drain", POOL.id, "w0")
    (worker,) = asked(server, "workers", "list")["workers"]
    assert worker["drain_asked_at"] is not None
    asked(server, "workers", "undrain", POOL.id, "w0")
    events = [event["event"] for event in asked(server, "audit")["events"]]
    assert events[:2] == ["worker_undrain", "worker_drain"]
    assert len(events) == 13
    (pool,) = asked(server, "fleet")["pools"]
    assert (pool["base_model"], pool["workers"]) == (POOL.base_model, [])
    assert POOL.base_model in run(server, "fleet").output
    for words in (("tenants", "list"), ("keys", "list", tenant), ("workers", "list"), ("audit",)):
        assert run(server, *words).exit_code == 0


def test_errors_are_one_sentence(server: dict[str, str]) -> None:
    for words, says in (
        (("tenants", "show", "lab"), "Tenant not found. `cotrain admin tenants list` shows the ids."),
        (("workers", "drain", "p-none", "w0"), "Worker not found. `cotrain admin workers list` shows the ids."),
        (("runs", "move", "t-none", "r:train:0", "w0"), "Tenant not found."),
        (("tenants", "create", "\x1b[2J"), "name: String should match pattern"),
    ):
        result = run(server, *words)
        assert result.exit_code == 1
        assert says in result.output, result.output
    tenant = asked(server, "tenants", "create", "x")["tenant"]
    for limit, says in (("ops=0", "limits.ops: "), ("opps=1", "limits.opps: There is no field")):
        result = run(server, "tenants", "set", tenant, "--limit", limit)
        assert (result.exit_code, says in result.output) == (1, True), result.output
    assert run(server, "tenants", "set", tenant, "--limit", "ops=-1").exit_code == 2
    wrong = run(server | {"COTRAIN_ADMIN_KEY": "not-this-one-at-all"}, "tenants", "list")
    assert "does not take this admin key" in wrong.output
    none = run(server | {"COTRAIN_ADMIN_KEY": "", "COTRAIN_DATA_DIR": "/nowhere"}, "tenants", "list")
    assert "The admin key is needed" in none.output
