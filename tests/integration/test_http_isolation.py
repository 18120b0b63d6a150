"""Isolation of tenants: every route of the OpenAPI that takes an id, asked for a foreign id."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cotrain_server.app import create_app
from cotrain_server.limits import WRONG_KEYS_PER_MINUTE
from cotrain_server.settings import ServerSettings
from cotrain_store import redis_keys
from tests.support.draws import variant
from tests.support.http_api import ADMIN_KEY, ALICE, BOB, OPERATOR, POOL, Api, pass_body, running_api, sample_body
from tests.support.id_questions import Question, ask, ids_of, questions_of, unasked_fields, unknown_ids
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import StandIn, stand_in

API = "/api/v1/"
#: Returns the same answer for every request.
SILENT = f"{API}cancel_future"
#: Searches the caller's own sessions.
SEARCH = f"{API}sessions/search"
#: Is accepted at its seq, and fails when it runs.
LATER = (f"{API}mint/forward_backward_reverse_kl", "reference_model_path")


class Pair:
    """Alice and Bob, who both have objects, and the worker that made them."""

    def __init__(self, api: Api, worker: StandIn, alice: Any, bob: Any) -> None:
        self.api = api
        self.worker = worker
        self.alice = alice
        self.bob = bob
        self.seqs = itertools.count(2)

    async def bob_asks(self, question: Question, about: Any) -> Any:
        return await ask(self.api, question, about, self.bob, BOB, self.seqs)


@asynccontextmanager
async def alice_and_bob(url: str) -> AsyncIterator[Pair]:
    async with running_api(url) as api:
        with stand_in(api.services) as worker:
            things = [await make_things(api, worker, key) for key in (ALICE, BOB)]
            yield Pair(api, worker, *things)


async def make_things(api: Api, worker: StandIn, key: str) -> dict[str, Any]:
    """Make a run with a checkpoint `a`, and a sampler with a request. Return their ids."""
    run, sampler = await api.new_run(key), await api.new_sampler(key)
    await api.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}, key)
    await worker.run_log()
    await api.post("asample", sample_body(sampler, 0), key)
    start = {"base_model": POOL.base_model, "lora_config": {"rank": 4}}
    upload = (await api.post("external_weights_upload_start", start, key)).json()
    return ids_of(run, sampler, f"{sampler}:0", upload["upload_id"])


@functools.cache
def openapi() -> dict[str, Any]:
    """Return the OpenAPI, which takes half a second to build and is the same for every server."""
    settings = ServerSettings(redis_url="unix:///nowhere", data_dir=Path("/nowhere"))
    return create_app(settings).openapi()


def test_every_field_that_looks_like_an_id_is_tested() -> None:
    assert unasked_fields(openapi()) == set()
    assert len(questions_of(openapi())) >= 43


async def test_a_foreign_id_and_an_unknown_id_get_the_same_404(empty_redis: EmbeddedRedis) -> None:
    async with alice_and_bob(empty_redis.url) as pair:
        for question in questions_of(openapi()):
            foreign = await outcome(pair, question, pair.alice)
            assert foreign == await outcome(pair, question, unknown_ids(pair.alice)), question.name
            assert foreign[0] == expected(question), (question.name, foreign)
            assert not any(name in str(foreign) for name in strings(pair.alice)), question.name


async def test_the_same_request_for_own_objects_is_answered(empty_redis: EmbeddedRedis) -> None:
    async with alice_and_bob(empty_redis.url) as pair:
        for question in questions_of(openapi()):
            answer = await pair.bob_asks(question, pair.bob)
            # 408: pending. 400: the stand-in's model has no tokenizer for chats.
            assert answer.status_code < 400 or answer.status_code in usual(question), (
                question.name, answer.text,
            )  # fmt: skip


async def outcome(pair: Pair, question: Question, about: Any) -> tuple[int, Any]:
    """Send a request as Bob. Return status and message, or the final result of the request."""
    answer = await pair.bob_asks(question, about)
    if (question.path, question.field) == LATER:
        await pair.worker.run_log()
        future = await pair.api.post("retrieve_future", answer.json(), BOB)
        return answer.status_code, future.json()
    if question.path == SEARCH:
        return answer.status_code, answer.json()["sessions"]
    said = answer.json() if answer.content else {}
    return answer.status_code, said.get("detail", said.get("error"))


def expected(question: Question) -> int:
    if (question.path, question.field) == LATER or question.path == SEARCH:
        return 200
    return 204 if question.path == SILENT else 404


def usual(question: Question) -> set[int]:
    if question.path in {f"{API}retrieve_future", f"{API}retrieve_futures"}:
        return {408}
    # An upload without files cannot be finished. The sampler has no save to fork.
    refused = question.field in {"model", "upload_id"} or question.path == f"{API}fork_run"
    return {400} if refused else set()


def strings(ids: Any) -> set[str]:
    return {value for value in ids.values() if isinstance(value, str)}


@pytest.mark.parametrize("key", ["", "tml-alice_secret-of-bob", *map(variant, ("tml-nobody_x", "sk-x", "Bearer"))])
async def test_without_a_valid_key_every_route_is_closed_before_the_body_is_read(
    empty_redis: EmbeddedRedis, key: str
) -> None:
    async with running_api(empty_redis.url) as api:
        for question in questions_of(openapi()):
            answer = await api.http.request(
                question.method, question.path, content=b"\xff" * 10, headers={"X-API-Key": key}
            )
            assert answer.status_code in {401, 429}, question.name


async def test_an_address_with_wrong_keys_is_throttled_but_a_right_key_works(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        codes = [(await api.post("client/config", {}, "tml-x_y")).status_code for _ in range(11)]
        assert codes == [401] * 10 + [429]
        assert (await api.post("client/config", {})).status_code == 200


async def test_a_tenant_sees_only_its_own_queue(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        run = await api.new_run()
        await api.post("forward_backward", pass_body(run, 1))
        await api.post("asample", sample_body(await api.new_sampler(), 0))
        own = (await api.http.get("/status", headers={"X-API-Key": BOB})).json()
        assert own["pools"][0]["queue"] == {"ops": 0, "tokens": 0}
        assert own["pools"][0]["samples"] == {"waiting": 0, "running": 0}
        assert "tenants" not in own["pools"][0]
        everything = (await api.http.get("/status", headers=OPERATOR)).json()
        assert everything["pools"][0]["queue"]["ops"] == 2
        assert everything["pools"][0]["samples"]["waiting"] == 1


async def test_the_operator_sees_tenant_names_next_to_ids(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        key = await api.services.tenants.issue("ada")
        ada = await api.services.tenants.authenticate(key)
        await api.services.tenants.issue("ada's laptop", tenant=ada.id)
        await api.new_run(key=key)
        rows = [{"run": "r", "tenant": ada.id}, {"run": "s", "tenant": "without-a-key"}]
        await api.services.connection.lpush(redis_keys.cycles(POOL.id), json.dumps({"cycle": 1, "runs": rows}))
        [pool] = (await api.http.get("/status", headers=OPERATOR)).json()["pools"]
        named = [(row["tenant"], row["tenant_name"]) for row in pool["tenants"]]
        assert named == [(ada.id, "ada")]
        assert [row["tenant_name"] for row in pool["cycles"][0]["runs"]] == ["ada", ""]


@pytest.mark.parametrize(
    ("address", "headers", "settings", "code"),
    [
        # Requests through a proxy on this host that adds no header look like this.
        ("127.0.0.1", {}, {}, 404),
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, {"admin_key": None}, 404),
        ("::1", {"host": "localhost"}, {"admin_key": None}, 404),
        ("127.0.0.1", {"x-api-key": ""}, {"admin_key": None}, 404),
        ("127.0.0.1", {"x-api-key": ALICE}, {}, 404),
        ("192.0.2.1", {"x-api-key": ADMIN_KEY}, {}, 200),
        ("192.0.2.1", {"authorization": f"Bearer {ADMIN_KEY}"}, {}, 200),
        ("192.0.2.1", {"authorization": "Bearer wrong"}, {}, 404),
        ("127.0.0.1", {"x-api-key": ADMIN_KEY}, {"admin_key": "another-key-of-ours"}, 404),
    ],
)
async def test_metrics_are_only_for_the_operator(
    empty_redis: EmbeddedRedis, address: str, headers: dict[str, str], settings: dict[str, str | None], code: int
) -> None:
    async with running_api(empty_redis.url, address, **settings) as api:
        assert (await api.http.get("/metrics", headers=headers)).status_code == code
        whole = (await api.http.get("/status", headers=headers)).json()
        assert ("redis" in whole) == (code == 200)


async def test_without_a_key_in_the_settings_the_key_file_opens_operator_routes(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, "192.0.2.1", admin_key=None) as api:
        kept = api.services.settings.data_dir / "admin-key"
        assert kept.stat().st_mode & 0o077 == 0
        key = kept.read_text().strip()
        assert len(key) >= 43  # 256 bits
        assert (await api.http.get("/metrics", headers={"X-API-Key": key})).status_code == 200


async def test_guessing_the_admin_key_is_throttled(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, "192.0.2.1") as api:
        guesses = [
            (await api.http.get("/metrics", headers={"X-API-Key": f"{number}"})).status_code
            for number in range(WRONG_KEYS_PER_MINUTE + 1)
        ]
        assert guesses == [404] * WRONG_KEYS_PER_MINUTE + [429]
        right = await api.http.get("/metrics", headers=OPERATOR)
        assert right.status_code == 200
