"""Roles: no key changes or reads more than its role allows. Every operation is sent by every kind
of caller.

A new route without a request in `tests/support/operations.py` fails these tests.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import pytest

from cotrain_server.http.auth import READING_POSTS
from cotrain_server.limits import WrongKeyCounter
from cotrain_server.ui.access import COOKIE
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.redis_client.connection import SyncConnection
from tests.support.http_api import ADMIN_KEY, ALICE, BOB, POOL, Api, pass_body, running_api, sample_body
from tests.support.operations import ADMIN, CHECKPOINT, EXTERNAL, Operation, Things, operations, path_of, send
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import stand_in
from tests.support.ui import log_in
from tests.support.uploads import adapter

SECRET, URL = "only-for-alice", "https://hooks.invalid/of-alice"
#: Keys that change for any role: last uses of keys, the audit log, counts of refusals, leases of processes, logouts.
NOT_OF_TENANTS = re.compile(
    f"{redis_keys.key_uses()}|cotrain:audit.*|cotrain:failures:.*|cotrain:webhooks:(lease|epoch)|cotrain:scheduler:lease"
    f"|{redis_keys.ended_session('.*')}"
)
#: Fields of a cycle that the pages draw; the worker of these tests leaves them out.
CYCLE = {
    "cycle": 1, "worker": "w0", "planned_at": 1.0, "started_at": 2.0, "duration_ms": 10.0, "tokens": 3,
    "computed_tokens": 3, "padded_tokens": 4, "forwards": 1, "wave_ms": 5.0, "sampling_ms": 0.0, "optim_ms": 1.0,
    "outcome": "ok",
}  # fmt: skip
#: Operations without a key, with the same answer for every caller.
PUBLIC = {
    "GET /", "GET /ui/static/{name:path}", "GET /ui/login", "POST /ui/login", "POST /ui/logout",
    "GET /healthz", "GET /api/v1/healthz", "GET /readyz",
}  # fmt: skip
#: An operation that names no object of Alice's: another tenant's call makes its own run, in the
#: common queue.
OF_ONES_OWN = "POST /api/v1/checkpoints/upload"
#: Valid requests that fail without an engine, and their status.
REFUSED_TO_MEMBERS = {
    "GET /readyz": 503,  # no scheduler
    "GET /ui/static/{name:path}": 404,  # no file of this name
    "GET /api/v1/files/{token}/{file}": 404,  # no files
    "GET /api/v1/traces/{token}": 403,  # the link is one to an archive
    "PUT /api/v1/uploads/{token}/{file}": 403,
    "POST /api/v1/fork_run": 400,  # the sampler has no save
    "POST /api/v1/external_weights_upload_finish": 503,  # queued, as the next one
    "GET /api/v1/tokenizers": 400,  # no tokenizer
    "POST /oai/api/v1/completions": 400,
    "POST /oai/api/v1/chat/completions": 400,
    "POST /oai/api/v1/responses": 400,
    "POST /oai/api/v1/responses/input_tokens": 400,
    "POST /anthropic/api/v1/messages": 400,
    "POST /anthropic/api/v1/messages/count_tokens": 400,
    OF_ONES_OWN: 503,  # queued, without an engine that would run it
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/move": 404,  # no other worker
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/move": 404,
    "POST /ui/tenants/{tenant_id}/keys/{key_id}/revoke": 404,  # revoked just before
    **{f"{method} {CHECKPOINT}": 405 for method in ("GET", "POST", "PUT")},
    "POST /ui/login": 401,  # a wrong key
}
#: Paths with a route that only explains an error, for any method.
EXPLAINED = {"/api/v1/training_runs/{run_id}/checkpoints/{name}": 400}


@pytest.fixture(autouse=True)
def no_upload_waits_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "FINISH_PATIENCE_S"):
        monkeypatch.setattr(f"cotrain_server.routes.uploads.{name}", 0.0)


@dataclass(frozen=True)
class Caller:
    """Caller with a key or token for the API, or a cookie for the pages."""

    headers: Mapping[str, str]
    cookie: str = ""

    async def ask(self, api: Api, operation: Operation, things: Things) -> httpx.Response:
        """Send the request of an operation."""
        api.http.cookies.clear()
        headers = {"Cookie": f"{COOKIE}={self.cookie}"} if operation.is_page else self.headers
        return await send(api.http, operation, things, headers)


def test_every_operation_of_the_openapi_is_sent() -> None:
    from fastapi.openapi.utils import get_openapi

    from cotrain_server.app import ROUTES

    documented = {
        f"{method.upper()} {path}"
        for path, methods in get_openapi(title="", version="", routes=ROUTES.routes)["paths"].items()
        for method in methods
    }
    asked = {operation.name.replace(":path}", "}") for operation in operations()}
    assert documented <= asked
    assert len(asked) > len(documented) > 70


async def make_things(api: Api) -> Things:
    """Make objects of Alice: a run with a checkpoint, a sampler with results and requests, and a
    webhook."""
    tenant = await api.services.tenants.authenticate(ALICE)
    opened = await api.post("create_session", {"user_metadata": {"note": SECRET}})
    session = opened.json()["session_id"]
    body = {"session_id": session, "base_model": POOL.base_model}
    made = {**body, "model_seq_id": 0, "lora_config": {"rank": 4}, "note": SECRET}
    run = (await api.post("create_model", made)).json()["model_id"]
    answer = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})
    sampler = answer.json()["sampling_session_id"]
    with stand_in(api.services) as worker:
        saved = {"model_id": run, "seq_id": 1, "path": "a", "user_metadata": {"note": SECRET}}
        await api.post("save_weights", saved)
        await worker.run_log()
        for seq in range(3):
            await api.post("asample", sample_body(sampler, seq))
        worker.claim()
        worker.finish(RequestId(f"{sampler}:0"), [1, 2])
        worker.finish(RequestId(f"{sampler}:1"), [3])
        await api.post("asample", sample_body(sampler, 3))
        await api.post("forward_backward", pass_body(run, 2))
    cycle = CYCLE | {"runs": [{"run": run, "tenant": tenant.id, "tokens": 3, "ops": {}, "failed": 0}]}
    await api.services.connection.lset(redis_keys.cycles(POOL.id), 0, json.dumps(cycle))
    headers = {"X-API-Key": ALICE}
    await api.http.put("/api/v1/webhook", json={"url": URL}, headers=headers)
    archive = f"/api/v1/training_runs/{run}/checkpoints/weights/a/archive"
    link = (await api.http.get(archive, headers=headers)).headers["location"]
    mate = await api.services.tenants.issue("mate", tenant=tenant.id)
    upload = (await api.post("external_weights_upload_start", EXTERNAL)).json()
    for file, content in adapter().items():
        await api.http.put(upload["urls"][file], content=content)
    ids = {
        "tenant_id": tenant.id, "run_id": run, "session_id": session, "sampling_session_id": sampler,
        "kind": "weights", "name": "a", "key_id": (await api.services.tenants.key(mate)).id,
        "pool_id": POOL.id, "worker_id": "w0", "pool": POOL.id, "cycle": "1",
        "token": link.split("/")[-2], "file": link.split("/")[-1], "model": POOL.base_model, "upload_id": upload["upload_id"],
    }  # fmt: skip
    return Things(ids, run, session, sampler, f"tinker://{run}/weights/a", (SECRET, URL, tenant.key_id))


async def caller_of(api: Api, key: str) -> Caller:
    """Log in with a key."""
    api.http.cookies.clear()
    assert (await log_in(api.http, key)).status_code == 303
    return Caller({"X-API-Key": key}, api.http.cookies[COOKIE])


@asynccontextmanager
async def fresh_api(url: str) -> AsyncIterator[Api]:
    """Run the API as a new process, so that earlier wrong keys do not throttle it."""
    async with running_api(url, long_poll_s=0.0) as api:
        api.services.wrong_keys = WrongKeyCounter(itertools.count(0, 61).__next__)
        yield api


def state_of(redis: SyncConnection) -> dict[str, bytes]:
    """Return every key with its value, without NOT_OF_TENANTS."""
    names = sorted(name.decode() for name in redis.scan_iter(count=10_000))
    kept = [name for name in names if not NOT_OF_TENANTS.fullmatch(name)]
    pipeline = redis.pipeline(transaction=False)
    for name in kept:
        pipeline.dump(name)
    return dict(zip(kept, pipeline.execute(), strict=True))


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def sessions_of(redis: SyncConnection, tenant: TenantId) -> set[str]:
    return {name.decode() for name in redis.zrange(redis_keys.tenant_sessions(tenant), 0, -1)}


def is_served(operation: Operation, answer: httpx.Response) -> bool:
    """Return True if an answer is the one for a member or the operator."""
    refused = REFUSED_TO_MEMBERS.get(operation.name, EXPLAINED.get(operation.path))
    return answer.status_code == refused if refused else answer.status_code < 400


def is_read(operation: Operation, things: Things) -> bool:
    return operation.method == "GET" or bool(READING_POSTS.fullmatch(path_of(operation, things)))


async def test_a_viewer_reads_everything_and_changes_nothing(empty_redis: EmbeddedRedis, redis: SyncConnection) -> None:
    async with fresh_api(empty_redis.url) as api:
        things = await make_things(api)
        tenant = TenantId(things.ids["tenant_id"])
        key = await api.services.tenants.issue("guest", tenant=tenant, role="viewer")
        viewer = await caller_of(api, key)
    async with fresh_api(empty_redis.url) as api:
        before = state_of(redis)
        jwt = (await api.post("auth/token", {}, key)).json()["jwt"]
        token = replace(viewer, headers={"Authorization": f"Bearer {jwt}"})
        for operation in operations():
            answer = await viewer.ask(api, operation, things)
            if is_read(operation, things) and not operation.is_of_operator:
                assert is_served(operation, answer), (operation.name, answer.text)
            else:
                refusal = 404 if is_hidden(operation, things) else 403
                for refused in (answer, await token.ask(api, operation, things)):
                    assert refused.status_code == refusal, (operation.name, refused.text)
            assert changed(before, state_of(redis)) == set(), operation.name
    assert changed(before, state_of(redis)) == set()  # nor is anything written when the process ends


def is_hidden(operation: Operation, things: Things) -> bool:
    """Return True if an operation does not exist for a tenant; forms check the role first."""
    return operation.is_of_operator and (not operation.is_page or is_read(operation, things))


async def test_callers_without_permission_change_and_read_nothing(
    empty_redis: EmbeddedRedis, redis: SyncConnection
) -> None:
    async with fresh_api(empty_redis.url) as api:
        things = await make_things(api)
        tenants, tenant = api.services.tenants, TenantId(things.ids["tenant_id"])
        stranger = await tenants.authenticate(BOB)
        key = await tenants.issue("old", tenant=tenant, not_after=time.time() + 3600)
        callers = {"foreign": await caller_of(api, BOB), "expired": await caller_of(api, key), "none": Caller({})}
        row = redis_keys.api_key((await tenants.key(key)).id)
        await api.services.connection.hset(row, "not_after", "1.0")
    forged = replace(things, ids={**things.ids, "token": things.ids["token"] + "x"})
    async with fresh_api(empty_redis.url) as api:
        before = state_of(redis)
        for name, caller in callers.items():
            for operation in operations():
                if name == "foreign" and operation.name == OF_ONES_OWN:
                    continue
                answer = await caller.ask(api, operation, forged)
                told = answer.text + str(answer.headers)
                assert not any(text in told for text in things.texts), (name, operation.name)
                if name == "foreign" and operation.is_of_operator and not operation.is_page:
                    assert (answer.status_code, answer.json()["detail"]) == (404, "Not Found")
                if name != "foreign" and operation.name not in PUBLIC:
                    closed = (303,) if operation.is_page else (401, 403, 404)
                    closed = (*closed, 401, 403, 404)
                    assert answer.status_code in closed, (name, operation.name, answer.text)
    own = {stranger.id, *sessions_of(redis, stranger.id)}
    names = changed(before, state_of(redis))
    assert {name for name in names if not any(each in name for each in own)} == set()


@pytest.mark.parametrize("is_operator", [False, True])
async def test_every_request_here_succeeds_for_a_permitted_caller(
    empty_redis: EmbeddedRedis, is_operator: bool
) -> None:
    """Otherwise a rejection would prove nothing about roles."""
    async with fresh_api(empty_redis.url) as api:
        things = await make_things(api)
        tenant = TenantId(things.ids["tenant_id"])
        mate = await api.services.tenants.issue("mate", tenant=tenant)
        caller = await caller_of(api, ADMIN_KEY if is_operator else mate)
        for operation in operations():
            if operation.is_of_operator is is_operator:
                answer = await caller.ask(api, operation, things)
                assert is_served(operation, answer), (operation.name, answer.text)
