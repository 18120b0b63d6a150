"""Checkpoints over HTTP and a real Redis: saved, kept, copied and deleted."""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Any
from urllib.parse import unquote

import pyrage
import pytest

from tests.support.checkpoint_requests import SAVES, change, copy, info, load, result, save, start, tenant_of
from tests.support.http_api import ALICE, BOB, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import StandIn, stand_in

HOUR_S = 3_600


# ---- Save ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAVES)
async def test_a_save_returns_the_path_of_its_kind(api: Api, worker: StandIn, kind: str) -> None:
    run = await api.new_run()
    answer = await save(api, worker, run, 1, kind)
    assert (answer["path"], answer["type"]) == (f"tinker://{run}/{kind}/a", SAVES[kind])


async def test_a_training_save_without_a_name_gets_one(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    answer = await save(api, worker, run, 1, path=None)
    assert answer["path"] == f"tinker://{run}/weights/000001"


async def test_a_repeated_save_is_the_same_request(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    body = {"model_id": run, "seq_id": 1, "path": "a"}
    first, again = [(await api.post("save_weights", body)).json() for _ in range(2)]
    assert first == again
    path = (await result(api, worker, await api.post("save_weights", body)))["path"]
    assert (await change(api, "DELETE", path)).status_code == 204
    assert (await api.post("save_weights", body)).json() == first
    other = await api.post("save_weights_external", body)
    assert other.json()["code"] == "seq_conflict"


async def test_a_taken_name_is_kept_unless_overwriting_is_allowed(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, 1)
    refused = await save(api, worker, run, 2)
    assert refused == {
        "error": "Checkpoint name 'a' already exists in this run; pass overwrite=true to replace it.",
        "category": "user",
    }
    assert "path" in await save(api, worker, run, 3, overwrite=True)


async def test_an_invalid_save_fails_at_its_seq_and_the_run_continues(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    refused = await save(api, worker, run, 1, path="../../etc/passwd")
    assert refused["category"] == "user"
    assert refused["error"].startswith("path (the argument `name` of clients) must be a name")
    recipients = ["age1nobody"]
    refused = await save(api, worker, run, 2, "external_weights", age_encryption_recipients=recipients)
    assert refused["error"].startswith("age_encryption_recipients[0] is neither an age X25519 recipient")
    good = [str(pyrage.x25519.Identity.generate().to_public())]
    kept = await save(api, worker, run, 3, "external_weights", age_encryption_recipients=good)
    assert kept["path"] == f"tinker://{run}/external_weights/a"


@pytest.mark.parametrize(
    ("limits", "limit"), [({"checkpoints": 1}, "1 checkpoints"), ({"checkpoint_bytes": 1_000}, "1000 bytes")]
)
async def test_a_save_over_the_quota_fails_until_space_is_freed(
    empty_redis: EmbeddedRedis, limits: dict[str, Any], limit: str
) -> None:
    async with running_api(empty_redis.url, quotas=limits) as api:
        with stand_in(api.services) as worker:
            run, bobs = await api.new_run(), await api.new_run(BOB)
            path = (await save(api, worker, run, 1))["path"]
            reached = f"Checkpoint storage quota reached ({limit}). Delete some that are not needed."
            for seq, kind in enumerate(SAVES, 2):
                refused = await save(api, worker, run, seq, kind, path="b")
                assert refused == {"error": reached, "category": "user"}
            assert (await copy(api, path)).json()["detail"] == reached
            assert "path" in await save(api, worker, bobs, 1, key=BOB)
            unnamed = {"path": None, "sampling_session_seq_id": 0}
            sampler = await save(api, worker, run, 5, "sampler_weights", **unnamed)
            assert sampler["sampling_session_id"]
            await change(api, "DELETE", path)
            assert "path" in await save(api, worker, run, 6, path="b")


# ---- Keep ----------------------------------------------------------------------------------------


async def test_a_deleted_checkpoint_is_gone_and_its_name_is_free(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    assert (await change(api, "DELETE", path)).status_code == 204
    assert (await change(api, "DELETE", path)).status_code == 404
    assert (await info(api, path)).status_code == 404
    assert (await save(api, worker, run, 2))["path"] == path


async def test_a_checkpoint_with_the_name_of_a_route_can_be_deleted(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    for seq, name in enumerate(["publish", "ttl", "archive"], 1):
        path = (await save(api, worker, run, seq, path=name))["path"]
        assert (await change(api, "POST", path, "/publish")).status_code == 204
        assert (await change(api, "DELETE", path, "/publish")).status_code == 204
        assert (await info(api, path)).status_code == 200
        assert (await change(api, "DELETE", path)).status_code == 204
        assert (await info(api, path)).status_code == 404


async def test_the_lifetime_of_a_checkpoint_can_be_changed(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    tenant = (await tenant_of(api)).id

    async def expires_in() -> float | None:
        expires_at = (await api.services.records.checkpoint(tenant, path)).expires_at
        return None if expires_at is None else round((expires_at - time.time()) / HOUR_S)

    assert await expires_in() is None
    assert (await change(api, "PUT", path, "/ttl", json={"ttl_seconds": 7_200})).status_code == 204
    assert await expires_in() == 2
    assert (await change(api, "PUT", path, "/ttl", json={"ttl_seconds": None})).status_code == 204
    assert await expires_in() is None
    for body, status in [({"ttl_seconds": 3_599}, 400), ({}, 422), ({"ttl_seconds": "1h"}, 422)]:
        assert (await change(api, "PUT", path, "/ttl", json=body)).status_code == status


async def test_checkpoint_operations_are_audited(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    await change(api, "PUT", path, "/ttl", json={"ttl_seconds": HOUR_S})
    await change(api, "POST", path, "/publish")
    await change(api, "GET", path, "/archive", key=BOB)
    await change(api, "DELETE", path, "/publish")
    await copy(api, path)
    await change(api, "DELETE", path)
    await change(api, "DELETE", path)
    assert await events(api, ALICE) == [
        "checkpoint_set_ttl",
        "checkpoint_publish",
        "checkpoint_unpublish",
        "checkpoint_copy",
        "checkpoint_delete",
    ]
    assert await events(api, BOB) == ["checkpoint_read"]


async def events(api: Api, key: str) -> list[str]:
    """Return the audited actions of a tenant, oldest first."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    entries = (await api.get(f"audit?day={day}", key)).json()["entries"]
    return [entry["event"] for entry in entries]


# ---- Copy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAVES)
async def test_a_copy_keeps_its_kind_and_its_run_cannot_be_trained(api: Api, worker: StandIn, kind: str) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1, kind))["path"]
    copied = (await copy(api, path)).json()["tinker_path"]
    copies_run = copied.removeprefix("tinker://").partition("/")[0]
    assert copied == f"tinker://{copies_run}/{kind}/a" != path
    assert (await info(api, copied)).json() == (await info(api, path)).json()
    step = {"model_id": copies_run, "seq_id": 1, "adam_params": {}}
    assert (await api.post("optim_step", step)).status_code in {400, 404}
    await change(api, "DELETE", path)
    assert (await info(api, copied)).status_code == 200
    if kind != "external_weights":
        assert (await start(api, copied, optimizer=False)).status_code == 200


async def test_a_copy_repeated_with_its_key_is_the_same_copy(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    headers = {"X-Idempotency-Key": "abc"}
    first = (await copy(api, path, headers=headers)).json()
    await save(api, worker, run, 2, overwrite=True)
    assert (await copy(api, path, headers=headers)).json() == first
    await change(api, "DELETE", path)
    assert (await copy(api, path, headers=headers)).json() == first
    assert (await copy(api, path, headers={"X-Idempotency-Key": "abd"})).status_code == 404
    other = (await save(api, worker, run, 3, path="b"))["path"]
    assert (await copy(api, other, headers=headers)).json()["code"] == "seq_conflict"


async def test_equal_keys_of_two_tenants_make_two_copies(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    await change(api, "POST", path, "/publish")
    headers = {"X-Idempotency-Key": "abc"}
    copies = [(await copy(api, path, key, headers=headers)).json() for key in (ALICE, BOB)]
    assert copies[0]["tinker_path"] != copies[1]["tinker_path"]


async def test_a_copy_is_placed_in_a_session(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    session = (await api.post("create_session", {})).json()["session_id"]
    slot = {"session_id": session, "model_seq_id": 5, "ttl_seconds": HOUR_S}
    answers = [(await copy(api, path, **slot)).json() for _ in range(2)]
    assert answers == [{"tinker_path": f"tinker://{session}:train:5/weights/a"}] * 2
    record = await api.services.records.checkpoint((await tenant_of(api)).id, answers[0]["tinker_path"])
    assert record.expires_at is not None


async def test_a_copy_of_a_foreign_checkpoint_needs_permission(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    assert (await copy(api, path, BOB)).status_code == 404
    token = {"X-Tinker-Weights-Access-Token": ALICE}
    copied = await copy(api, path, BOB, headers=token)
    assert copied.status_code == 200
    assert (await info(api, copied.json()["tinker_path"], BOB)).status_code == 200
    assert (await info(api, copied.json()["tinker_path"])).status_code == 404


async def test_an_invalid_copy_leaves_nothing(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    before = (await api.get("sessions")).json()
    assert (await copy(api, path + "b")).status_code == 404
    assert (await api.get("sessions")).json() == before
    await copy(api, path)
    runs = (await api.get("training_runs?project_id=archive")).json()["training_runs"]
    assert [run["user_metadata"] for run in runs] == [{"copied_from": path}]


async def test_a_copy_needs_a_target(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    for body in ({}, {"session_id": "s"}, {"model_seq_id": 1}):
        answer = await api.post("copy_weights", {"source_path": path, **body})
        assert answer.status_code == 400


# ---- Paths ---------------------------------------------------------------------------------------


HOSTILE = [
    "..", "../..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00", "%00", "a%0a", "//", "a//b",
    "%EF%BC%8E%EF%BC%8E", "%E2%80%A5", "a/../b", "a" * 4_096, "a%2fb", "..%5c..", "a%252e%252e",
    "%ff%fe", "a..b", "~", "a;b", "a%3fb", "a%20b", "-a", ".a", "a/",
]  # fmt: skip
HOSTILE_KINDS = ["%2e%2e", "Weights", "snapshots", "weights%2f.."]

CHANGES = [
    ("DELETE", ""),
    ("POST", "/publish"),
    ("DELETE", "/publish"),
    ("PUT", "/ttl"),
    ("GET", "/archive"),
    ("GET", "/external_weights_urls"),
]


async def test_names_cannot_lead_to_other_paths(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    names = [*product(["weights"], HOSTILE), *product(HOSTILE_KINDS, ["a", "..", "%2e%2e"])]
    for (kind, name), (method, then) in product(names, CHANGES):
        target = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}{then}"
        status, detail = await ask_raw(api, method, target)
        assert status in {400, 404, 405}, target
        assert status != 400 or detail == "The checkpoint path is malformed. Use tinker://<run>/weights/<name>."
    assert (await info(api, path)).status_code == 200


async def ask_raw(api: Api, method: str, target: str) -> tuple[int, str]:
    """Send an unmodified target, which HTTP clients would normalize. Return status and message."""
    messages: list[Any] = []
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(target),
        "raw_path": target.encode(),
        "query_string": b"",
        "headers": [(b"x-api-key", ALICE.encode()), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
        "scheme": "http",
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"ttl_seconds":null}'}

    async def send(message: Any) -> None:
        messages.append(message)

    await api.app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in messages)
    return messages[0]["status"], json.loads(body)["detail"]


NO_PATHS = [
    "x", "tinker://", "tinker://{run}", "tinker://{run}/weights", "tinker://{run}/weights/",
    "tinker://{run}/weights/../a", "tinker://{run}/weights/a/", "tinker://{run}//a",
    "tinker://{run}/weights/a\0", "tinker://../weights/a", "tinker://{run}/sampler/a",
    "file:///etc/passwd", "tinker://{run}/weights/a\n", "TINKER://{run}/weights/a",
    "tinker://{run}/weights/\uff0e\uff0e",
]  # fmt: skip


async def test_a_bare_name_is_rejected_with_the_format_of_an_id(api: Api) -> None:
    run = await api.new_run()
    at = f"/api/v1/training_runs/{run}/checkpoints"
    for method, path in (
        ("DELETE", "0001"), ("GET", "0001"), ("GET", "0001/archive"), ("POST", "0001/publish"),
        ("DELETE", "0001/publish"), ("PUT", "0001/ttl"), ("GET", "0001/external_weights_urls"),
    ):  # fmt: skip
        answer = await api.http.request(method, f"{at}/{path}", headers={"X-API-Key": ALICE})
        assert answer.status_code == 400, (method, path)
        assert answer.json()["code"] == "malformed_path", answer.text
        assert "/<name>" in answer.json()["detail"]
        assert (await api.http.request(method, f"{at}/{path}")).status_code in {401, 429}
    wrong_method = await api.http.get(f"{at}/weights/0001", headers={"X-API-Key": ALICE})
    assert wrong_method.status_code == 405


async def test_an_invalid_path_is_rejected_on_every_route(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, 1)
    for seq, wrong in enumerate(NO_PATHS, 2):
        path = wrong.format(run=run)
        for answer in (await info(api, path), await start(api, path), await copy(api, path)):
            assert answer.status_code == 400, path
            assert answer.json()["detail"] == "The checkpoint path is malformed. Use tinker://<run>/weights/<name>."
        failed = await result(api, worker, await load(api, run, seq, path))
        assert failed == {
            "error": "The checkpoint path is malformed. Use tinker://<run>/weights/<name>.",
            "category": "user",
        }
