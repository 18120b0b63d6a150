"""What a tenant reads that has too much: 429, how long to wait, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.http_api import ALICE, BOB, POOL, pass_body, running_api
from tests.support.stand_in import stand_in

if TYPE_CHECKING:
    import httpx

    from tests.support.http_api import Api
    from tests.support.redis_server import EmbeddedRedis


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Take a refusal apart; one without Retry-After is none."""
    assert float(answer.headers["Retry-After"]) > 0
    return answer.status_code, answer.json()["code"]


async def forget_samplers(api: Api) -> None:
    """Let all samplers have ended by themselves."""
    redis = api.services.connection
    for samplers in await redis.keys("cotrain:tenant:*:samplers"):
        for sampler in await redis.zrange(samplers, 0, -1):
            await redis.zadd(samplers, {sampler: 1})


async def unread_bytes(api: Api) -> list[Any]:
    """Ask for what was never fetched, as two tenants and as the operator."""
    keys: list[dict[str, str]] = [{"X-API-Key": ALICE}, {"X-API-Key": BOB}, {}]
    return [(await api.http.get("/status", headers=key)).json()["unread_bytes"] for key in keys]


async def test_sessions_over_the_quota_are_refused_until_one_is_finished(
    empty_redis: EmbeddedRedis,
) -> None:
    async with running_api(empty_redis.url, quota_sessions=2) as api:
        first = (await api.post("create_session", {})).json()["session_id"]
        assert (await api.post("create_session", {})).status_code == 200
        over = await api.post("create_session", {})
        assert refusal(over) == (429, "session_quota_reached")
        assert (await api.post("create_session", {}, BOB)).status_code == 200
        await api.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})
        assert (await api.post("create_session", {})).status_code == 200


async def test_samplers_over_the_quota_are_refused_and_a_repeat_is_not(
    empty_redis: EmbeddedRedis,
) -> None:
    async with running_api(empty_redis.url, quota_samplers=1) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        body = {"session_id": session, "base_model": POOL.base_model}
        first = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})
        assert first.status_code == 200
        over = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 1})
        assert refusal(over) == (429, "sampler_quota_reached")
        again = await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})
        assert again.json() == first.json()


async def test_a_save_without_a_name_waits_for_room_for_its_sampler_and_a_repeat_does_not(
    empty_redis: EmbeddedRedis,
) -> None:
    async with running_api(empty_redis.url, quota_samplers=1) as api:
        run = await api.new_run()
        with stand_in(api.services) as worker:
            unnamed = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
            first = await api.post("save_weights_for_sampler", unnamed)
            assert (await api.post("save_weights_for_sampler", unnamed)).json() == first.json()
            another = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 1}
            over = await api.post("save_weights_for_sampler", another)
            assert refusal(over) == (429, "sampler_quota_reached")  # the first waits, and counts
            await worker.run_log()
            over = await api.post("save_weights_for_sampler", another)
            assert refusal(over) == (429, "sampler_quota_reached")
            assert (await api.post("save_weights_for_sampler", unnamed)).json() == first.json()
            named = {"model_id": run, "seq_id": 2, "path": "a"}
            assert (await api.post("save_weights_for_sampler", named)).status_code == 200
            await forget_samplers(api)
            another = {**another, "seq_id": 3}
            assert (await api.post("save_weights_for_sampler", another)).status_code == 200


async def test_who_fetches_nothing_is_told_to_and_can_go_on_after_it(
    empty_redis: EmbeddedRedis,
) -> None:
    async with running_api(empty_redis.url, quota_unread_bytes=60) as api:
        run = await api.new_run()
        with stand_in(api.services) as worker:
            accepted = await api.post("forward_backward", pass_body(run, 1))
            await worker.run_log()
            over = await api.post("forward_backward", pass_body(run, 2))
            assert refusal(over) == (429, "unread_quota_reached")
            assert over.json()["detail"] == "Unread results exceed the quota; fetch them."
            alice, bob, everybody = await unread_bytes(api)
            assert alice >= 60
            assert bob == 0
            assert list(everybody.values()) == [alice]
            for request in (f"{run}:0", accepted.json()["request_id"]):
                read = await api.post("retrieve_future", {"request_id": request})
                assert read.status_code == 200
            await api.services.futures._unread.tell()  # it does so every now and then
            assert await unread_bytes(api) == [0, 0, dict.fromkeys(everybody, 0)]
            assert (await api.post("forward_backward", pass_body(run, 2))).status_code == 200
