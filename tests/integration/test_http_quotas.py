"""Answers to a tenant over its quota: 429, the time to wait, and a remedy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cotrain_store.errors import Reason
from tests.support.http_api import ALICE, BOB, OPERATOR, Api, pass_body, running_api
from tests.support.http_api import POOL as API_POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import stand_in


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Return error code and message of a rejection, and check its Retry-After."""
    assert float(answer.headers["Retry-After"]) > 0
    return answer.status_code, answer.json()["code"]


async def forget_samplers(api: Api) -> None:
    """Expire all samplers."""
    redis = api.services.connection
    for samplers in await redis.keys("cotrain:tenant:*:samplers"):
        for sampler in await redis.zrange(samplers, 0, -1):
            await redis.zadd(samplers, {sampler: 1})


async def unread_bytes(api: Api) -> list[Any]:
    """Return the unread bytes as seen by two tenants and by the operator."""
    keys: list[dict[str, str]] = [{"X-API-Key": ALICE}, {"X-API-Key": BOB}, OPERATOR]
    return [(await api.http.get("/status", headers=key)).json()["unread_bytes"] for key in keys]


async def test_sessions_over_the_quota_are_rejected_until_one_is_finished(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"sessions": 2}) as api:
        first = (await api.post("create_session", {})).json()["session_id"]
        assert (await api.post("create_session", {})).status_code == 200
        over = await api.post("create_session", {})
        assert refusal(over) == (429, "session_quota_reached")
        assert (await api.post("create_session", {}, BOB)).status_code == 200
        await api.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})
        assert (await api.post("create_session", {})).status_code == 200


async def test_runs_over_the_byte_quota_are_rejected_on_every_route(empty_redis: EmbeddedRedis) -> None:
    weight = 3 * 16 * 4 * 100  # of a run of rank 4
    async with running_api(empty_redis.url, quotas={"run_bytes": 2 * weight}) as api:
        run = await api.new_run()
        session = run.partition(":")[0]
        body = {"session_id": session, "model_seq_id": 1, "base_model": API_POOL.base_model, "lora_config": {"rank": 8}}
        over = await api.post("create_model", body)
        assert refusal(over) == (429, "run_bytes_quota_reached")
        assert f"hold {weight} bytes, and this run would hold {2 * weight}" in over.json()["detail"]
        body["lora_config"] = {"rank": 16}
        never = await api.post("create_model", body)
        assert (never.status_code, never.json()["code"]) == (400, "run_too_large")
        assert "quota run_bytes" in never.json()["detail"]
        with stand_in(api.services) as worker:
            saved = await api.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
            assert saved.status_code == 200
            await worker.run_log()
            load = {"session_id": session, "path": f"tinker://{run}/weights/a", "optimizer": False}
            assert (await api.post("load_weights", {**load, "model_seq_id": 2})).status_code == 200
            over = await api.post("load_weights", {**load, "model_seq_id": 3})
            assert refusal(over) == (429, "run_bytes_quota_reached")
        own = (await api.get("usage")).json()["stored"]
        assert own["runs"] == 2 * weight
        assert own["checkpoints"] > 0
        assert (await api.http.get("/status", headers={"X-API-Key": ALICE})).json()["run_bytes"] == 2 * weight
        everything = (await api.http.get("/status", headers=OPERATOR)).json()
        assert list(everything["run_bytes"].values()) == [2 * weight]
        scrape = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text
        assert f'cotrain_run_bytes{{tenant="{next(iter(everything["run_bytes"]))}"}} {2.0 * weight}' in scrape


async def test_samplers_over_the_quota_are_rejected_but_a_repeat_is_not(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"samplers": 1}) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        body = {"session_id": session, "base_model": API_POOL.base_model}
        first = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})
        assert first.status_code == 200
        over = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 1})
        assert refusal(over) == (429, "sampler_quota_reached")
        again = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})
        assert again.json() == first.json()


async def test_an_unnamed_save_waits_for_its_sampler_quota_but_a_repeat_does_not(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"samplers": 1}) as api:
        run = await api.new_run()
        with stand_in(api.services) as worker:
            unnamed = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
            first = await api.post("save_weights_for_sampler", unnamed)
            assert (await api.post("save_weights_for_sampler", unnamed)).json() == first.json()
            another = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 1}
            over = await api.post("save_weights_for_sampler", another)
            assert refusal(over) == (429, "sampler_quota_reached")  # the pending first one counts
            await worker.run_log()
            over = await api.post("save_weights_for_sampler", another)
            assert refusal(over) == (429, "sampler_quota_reached")
            assert (await api.post("save_weights_for_sampler", unnamed)).json() == first.json()
            named = {"model_id": run, "seq_id": 2, "path": "a"}
            assert (await api.post("save_weights_for_sampler", named)).status_code == 200
            await forget_samplers(api)
            another = {**another, "seq_id": 3}
            assert (await api.post("save_weights_for_sampler", another)).status_code == 200


async def test_a_tenant_with_unread_results_is_told_to_fetch_and_can_continue(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"unread_bytes": 60}) as api:
        run = await api.new_run()
        with stand_in(api.services) as worker:
            accepted = await api.post("forward_backward", pass_body(run, 1))
            await worker.run_log()
            over = await api.post("forward_backward", pass_body(run, 2))
            assert refusal(over) == (429, "unread_quota_reached")
            assert over.json()["detail"] == Reason.UNREAD_QUOTA_REACHED.message
            alice, bob, everybody = await unread_bytes(api)
            assert alice >= 60
            assert bob == 0
            assert list(everybody.values()) == [alice]
            for request in (f"{run}:0", accepted.json()["request_id"]):
                read = await api.post("retrieve_future", {"request_id": request})
                assert read.status_code == 200
            await api.services.futures._deliveries.flush()  # otherwise it does so periodically
            assert await unread_bytes(api) == [0, 0, {}]
            assert (await api.post("forward_backward", pass_body(run, 2))).status_code == 200


async def records_kept(api: Api) -> dict[str, int]:
    """Return the number of counted records of each tenant."""
    redis = api.services.connection
    keys = await redis.keys("cotrain:tenant:*:record_bytes")
    return {key.decode(): int(await redis.get(key)) for key in keys}


async def test_ended_sessions_and_runs_count_permanently_and_repeats_do_not(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"record_bytes": 5_000}) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        run = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": API_POOL.base_model,
            "user_metadata": {"note": "x" * 5_000},
        }
        made = await api.post("create_model", run)
        before = await records_kept(api)
        assert [kept > 7_000 for kept in before.values()] == [True]
        assert (await api.post("create_model", run)).json() == made.json()
        await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        for path, body in (
            ("create_session", {}),
            ("copy_weights", {"source_path": f"tinker://{session}:train:0/weights/a",
                              "destination_project_id": "p"}),
        ):  # fmt: skip
            over = await api.post(path, body)
            assert (over.status_code, over.json()["code"]) == (400, "record_quota_reached")
            assert "quota record_bytes" in over.json()["detail"]
        assert await records_kept(api) == before
        assert (await api.post("create_session", {}, BOB)).status_code == 200


async def test_a_run_over_the_record_quota_is_rejected_in_a_live_session(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"record_bytes": 1_500}) as api:
        await api.new_run()
        session = (await api.get("sessions")).json()["sessions"][0]
        body = {"session_id": session, "model_seq_id": 1, "base_model": API_POOL.base_model}
        over = await api.post("create_model", body)
        assert (over.status_code, over.json()["code"]) == (400, "record_quota_reached")


@pytest.mark.parametrize(
    "notes", [{"user_metadata": {"a": "x" * 70_000}}, {"tags": ["x" * 1_000] * 70}], ids=["metadata", "tags"]
)
async def test_large_metadata_of_a_session_is_rejected(empty_redis: EmbeddedRedis, notes: dict[str, Any]) -> None:
    async with running_api(empty_redis.url) as api:
        over = await api.post("create_session", notes)
        assert (over.status_code, over.json()["code"]) == (400, "invalid")
        assert f"{next(iter(notes))} may have at most 65536 bytes" in over.json()["detail"]
        too_long = await api.post("create_session", {"sdk_version": "x" * 257})
        assert too_long.status_code == 422


async def test_without_memory_no_permanent_object_is_created(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(empty_redis.url) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        monkeypatch.setattr("cotrain_store.disk.capacity._ASK_MEMORY_EVERY_S", 0.0)
        monkeypatch.setattr("cotrain_store.disk.capacity.MEMORY_SHARE", 1e-9)
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": API_POOL.base_model}
        for path, body in (("create_session", {}), ("create_sampling_session", sampler)):
            assert refusal(await api.post(path, body)) == (429, "store_full")


async def test_low_memory_lowers_the_limit_of_unread_results(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.disk.capacity._ASK_MEMORY_EVERY_S", 0.0)
    async with running_api(empty_redis.url) as api:
        run, other = await api.new_run(), await api.new_run(BOB)
        sampler = await api.new_sampler()
        with stand_in(api.services) as worker:
            await worker.run_log()
            fetched = await api.post("retrieve_future", {"request_id": f"{other}:0"}, BOB)
            assert fetched.status_code == 200
            await api.services.futures._deliveries.flush()
            monkeypatch.setattr("cotrain_store.disk.capacity.UNREAD_SHARE", 1e-9)
            assert (await api.post("forward_backward", pass_body(run, 1))).status_code == 200
            monkeypatch.setattr("cotrain_store.disk.capacity.CROWDED_SHARE", 1e-9)
            over = await api.post("forward_backward", pass_body(run, 2))
            assert refusal(over) == (429, "unread_quota_reached")
            sample = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "num_samples": 1,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {"max_tokens": 1},
            }
            assert refusal(await api.post("asample", sample)) == (429, "unread_quota_reached")
            theirs = await api.post("forward_backward", pass_body(other, 1), BOB)
            assert theirs.status_code == 200
