"""No tenant reaches another's things: every route that takes an id, found in the OpenAPI itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from tests.support.http_api import BOB, POOL, pass_body, running_api, sample_body

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.http_api import Api
    from tests.support.redis_server import EmbeddedRedis

#: Fields and path parameters that name something a tenant owns.
IDS = {"model_id", "session_id", "request_id", "sampling_session_id", "target"}
#: What a body of each route needs beside the id, so that only the id can be what is wrong.
VALID: dict[str, dict[str, Any]] = {
    "/api/v1/asample": sample_body("", 1),
    "/api/v1/create_model": {"model_seq_id": 7, "base_model": POOL.base_model},
    "/api/v1/create_sampling_session": {
        "sampling_session_seq_id": 7,
        "base_model": POOL.base_model,
    },
    "/api/v1/forward": {"seq_id": 1, "forward_input": {}},
    "/api/v1/forward_backward": {"seq_id": 1, "forward_backward_input": {}},
    "/api/v1/optim_step": {"seq_id": 1, "adam_params": {}},
    "/api/v1/save_weights_for_sampler": {"seq_id": 1, "path": "a"},
    "/api/v1/sessions/{session_id}/finish": {"reason": {"type": "success"}},
}
#: Carries an id that names nothing here: it is not even read.
NO_LOOKUP = {"/api/v1/telemetry"}
READ_ONLY = "/api/v1/samplers/{sampling_session_id}"
#: Says the same whatever it is asked to stop.
SILENT = "/api/v1/cancel_future"


def routes_with_ids(openapi: dict[str, Any]) -> dict[str, set[str]]:
    """Find every route of the training protocol that takes an id of ours: path → names of its ids."""
    schemas = openapi["components"]["schemas"]
    found = {}
    for path, methods in openapi["paths"].items():
        names = set(re.findall(r"{(\w+)}", path))
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
        ids = (names | set(schema.get("properties", {}))) & IDS
        if ids and path not in NO_LOOKUP:
            found[path] = ids
    return found


def test_the_matrix_covers_the_routes_there_are(tmp_path: Path) -> None:
    settings = ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)
    assert set(routes_with_ids(create_app(settings).openapi())) == {
        "/api/v1/asample",
        "/api/v1/cancel_future",
        "/api/v1/create_model",
        "/api/v1/create_sampling_session",
        "/api/v1/forward",
        "/api/v1/forward_backward",
        "/api/v1/get_info",
        "/api/v1/optim_step",
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/samplers/{sampling_session_id}",
        "/api/v1/save_weights_for_sampler",
        "/api/v1/session_heartbeat",
        "/api/v1/sessions/{session_id}/finish",
        "/api/v1/unload_model",
    }


async def test_a_foreign_id_and_an_unknown_id_get_the_same_404(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        run, sampler = await api.new_run(), await api.new_sampler()
        await api.post("asample", sample_body(sampler, 0))
        for request_id in (f"{run}:0", f"{sampler}:0"):
            alices = ids_of(run, sampler, request_id)
            unknown = ids_of(*map(unknown_id, (run, sampler, request_id)))
            for path, names in routes_with_ids(api.app.openapi()).items():
                foreign = await ask(api, path, {name: alices[name] for name in names})
                nothing = await ask(api, path, {name: unknown[name] for name in names})
                code = 204 if path == SILENT else 404
                assert foreign.status_code == nothing.status_code == code, (path, foreign.text)
                assert detail(foreign) == detail(nothing), path
                assert run not in foreign.text
                assert sampler not in foreign.text


async def test_a_foreign_request_changes_nothing_for_its_owner(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        run, sampler = await api.new_run(), await api.new_sampler()
        future = (await api.post("asample", sample_body(sampler, 0))).json()
        ids = ids_of(run, sampler, future["request_id"])
        for path, names in routes_with_ids(api.app.openapi()).items():
            await ask(api, path, {name: ids[name] for name in names})
        assert (await api.post("forward_backward", pass_body(run, 1))).status_code == 200
        beat = await api.post("session_heartbeat", {"session_id": ids["session_id"]})
        assert beat.status_code == 200
        assert (await api.post("retrieve_future", future)).status_code == 408


@pytest.mark.parametrize("key", ["", "tml-nobody_x", "tml-alice_secret-of-bob", "sk-x", "Bearer"])
async def test_without_a_good_key_every_route_is_closed_before_its_body_is_read(
    empty_redis: EmbeddedRedis, key: str
) -> None:
    async with running_api(empty_redis.url) as api:
        for path in routes_with_ids(api.app.openapi()):
            method = "GET" if path == READ_ONLY else "POST"
            headers = {"X-API-Key": key}
            answer = await api.http.request(method, path, content=b"\xff" * 10, headers=headers)
            assert answer.status_code in {401, 429}, path


async def test_an_address_with_many_wrong_keys_is_slowed_and_a_right_key_still_works(
    empty_redis: EmbeddedRedis,
) -> None:
    async with running_api(empty_redis.url) as api:
        codes = [(await api.post("client/config", {}, "tml-x_y")).status_code for _ in range(11)]
        assert codes == [401] * 10 + [429]
        assert (await api.post("client/config", {})).status_code == 200


async def test_a_tenant_sees_its_own_queue_and_nobody_elses(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        run = await api.new_run()
        await api.post("forward_backward", pass_body(run, 1))
        await api.post("asample", sample_body(await api.new_sampler(), 0))
        own = (await api.http.get("/status", headers={"X-API-Key": BOB})).json()
        assert own["pools"][0]["queue"] == {"ops": 0, "tokens": 0}
        assert own["pools"][0]["samples"] == {"waiting": 0, "running": 0}
        assert "tenants" not in own["pools"][0]
        everything = (await api.http.get("/status")).json()
        assert everything["pools"][0]["queue"]["ops"] == 2
        assert everything["pools"][0]["samples"]["waiting"] == 1


@pytest.mark.parametrize(
    ("address", "headers", "settings", "code"),
    [
        ("127.0.0.1", {}, {}, 200),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.1"}, {}, 404),
        ("192.0.2.1", {}, {}, 404),
        ("127.0.0.1", {}, {"admin_key": "s3cret"}, 404),
        ("192.0.2.1", {"x-api-key": "s3cret"}, {"admin_key": "s3cret"}, 200),
        ("192.0.2.1", {"authorization": "Bearer s3cret"}, {"admin_key": "s3cret"}, 200),
        ("192.0.2.1", {"authorization": "Bearer wrong"}, {"admin_key": "s3cret"}, 404),
    ],
)
async def test_metrics_are_for_the_operator(
    empty_redis: EmbeddedRedis,
    address: str,
    headers: dict[str, str],
    settings: dict[str, str],
    code: int,
) -> None:
    async with running_api(empty_redis.url, address, **settings) as api:
        assert (await api.http.get("/metrics", headers=headers)).status_code == code


def ids_of(run: str, sampler: str, request_id: str) -> dict[str, Any]:
    """Name everything that a tenant has, as the wire does."""
    return {
        "model_id": run,
        "session_id": run.partition(":")[0],
        "request_id": request_id,
        "sampling_session_id": sampler,
        "target": {"type": "sampling_session", "sampling_session_id": sampler},
    }


def unknown_id(name: str) -> str:
    """Put the session that nobody has into an id."""
    return re.sub("[0-9a-f]{32}", "0" * 32, name)


def detail(answer: Any) -> Any:
    return answer.json()["detail"] if answer.content else None


async def ask(api: Api, path: str, ids: dict[str, str]) -> Any:
    """Ask as Bob, with ids that are not his."""
    if path == READ_ONLY:
        return await api.get(path.removeprefix("/api/v1/").format(**ids), BOB)
    in_path = set(re.findall(r"{(\w+)}", path))
    body = {name: value for name, value in ids.items() if name not in in_path}
    return await api.post(
        path.removeprefix("/api/v1/").format(**ids), {**VALID.get(path, {}), **body}, BOB
    )
