"""Audit before action: if the line of an action cannot be written, nothing is changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import StoreUnavailable
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.tenants.audit_log import Audit
from tests.support.http_api import ADMIN_KEY, ALICE, POOL, Api, running_api
from tests.support.lists import save
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import stand_in
from tests.support.ui import log_in, send

OWN, OPERATOR = {"X-API-Key": ALICE}, {"X-API-Key": ADMIN_KEY}
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
