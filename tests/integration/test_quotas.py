"""Quotas of a tenant: results, sessions, samplers, ops; over HTTP a 429 with the time to wait and a remedy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Reason, SamplerNotFound
from cotrain_store.messages.ids import OpId, RequestId, RunId, SamplerId, SessionId, TenantId
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.intake import SAMPLER_REST_MS, Intake
from cotrain_store.redis_client.connection import CONNECTION_LOST, repeat, stop_tasks
from cotrain_store.results.delivery_log import DeliveryLog
from cotrain_store.sampling.intake import SampleIntake
from cotrain_store.tenants.quotas import Quotas
from cotrain_store.tenants.records import Records
from tests.support.http_api import ALICE, BOB, OPERATOR, Api, pass_body, running_api
from tests.support.http_api import POOL as API_POOL
from tests.support.limits import always
from tests.support.log import Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.samples import BODY, LARGE_BODY, RESULT, Samples, sampler_record
from tests.support.stack import POOL
from tests.support.stand_in import stand_in
from tests.support.waiting import until

A = TenantId("a")
LARGE = Result(ResultKind.PASS, b"x" * (INLINE_LIMIT_BYTES + 1))


def unread(log: Log, tenant: TenantId = A) -> int:
    return int(log.redis.hget(redis_keys.unread(tenant), "bytes") or 0)


def second_of(run: RunRecord) -> RunRecord:
    return replace(run, id=RunId(f"{run.session}:train:1"))


def limited(log: Log, unread_bytes: int) -> Intake:
    return Intake(log.connection, log.spool, always(Quotas(unread_bytes=unread_bytes)))


async def test_results_count_completely_until_they_are_sent(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    step = await log.plan()
    results: dict[OpId, Result] = {(run.id, 0): Result.of_json({}), (run.id, 1): LARGE}
    log.execution.commit(step, results, {}, {})
    log.execution.commit(step, results, {}, {})
    assert unread(log) == len(b"{}") + len(LARGE.payload)
    async with log.futures() as futures:
        for _ in range(2):
            assert isinstance(await futures.wait(A, RequestId(f"{run.id}:1"), 1.0), Result)
    assert unread(log) == len(b"{}")


async def test_only_a_tenant_that_fetches_nothing_is_rejected(log: Log) -> None:
    run, other = await log.new_run("a"), await log.new_run("b")
    await log.run_all()
    intake = limited(log, unread(log))
    before = log.everything()
    with refused(Reason.UNREAD_QUOTA_REACHED, match="exceed the quota unread_bytes. Fetch them"):
        await intake.create_run(second_of(run))
    assert log.everything() == before
    log.redis.hset(redis_keys.unread(other.tenant), "bytes", 0)
    await intake.create_run(second_of(other))
    deliveries = DeliveryLog(log.connection)
    deliveries.sent(A, RequestId(f"{run.id}:0"), POOL, 0.0)
    await deliveries.flush()
    await intake.create_run(second_of(run))


async def test_a_large_request_over_the_quota_is_not_written(samples: Samples) -> None:
    log, run, sampler = samples.log, await samples.log.new_run(), await samples.sampler()
    await log.run_all()
    full = limited(log, unread(log))
    full_too = SampleIntake(log.connection, log.spool, always(Quotas(unread_bytes=unread(log))))
    before = log.everything()
    for _ in range(2):
        with refused(Reason.UNREAD_QUOTA_REACHED):
            await full.submit(run, 1, OpKind.FORWARD, LARGE.payload, 7, "d")
        with refused(Reason.UNREAD_QUOTA_REACHED):
            await full_too.submit(sampler, 0, LARGE_BODY)
    busy = SampleIntake(log.connection, log.spool, always(Quotas(bytes=1)))
    with refused(Reason.SAMPLING_BUSY):
        await busy.submit(sampler, 0, LARGE_BODY)
    assert log.everything() == before
    assert list(log.spool.folder.iterdir()) == []
    await samples.intake.submit(sampler, 0, LARGE_BODY)
    assert [claimed.body for claimed in samples.sampling.claim(1)] == [LARGE_BODY]


async def test_an_expired_result_does_not_count(log: Log) -> None:
    run = await log.new_run()
    await log.run_all()
    intake = limited(log, unread(log))
    until = redis_keys.unread_until(A)
    in_ms = log.redis.zscore(until, f"{run.id}:0") - log.redis.time()[0] * 1000
    assert in_ms == pytest.approx(redis_keys.SMALL_RESULT_TTL_MS, abs=60_000)
    log.redis.zadd(until, {f"{run.id}:0": 1})
    await intake.create_run(second_of(run))
    assert unread(log) == 0


async def test_samples_count_like_other_results(samples: Samples) -> None:
    log, sampler = samples.log, await samples.sampler()
    [request] = await samples.submit(sampler, 0)
    samples.claim()
    samples.resolve(request)
    samples.resolve(request)
    assert unread(log) == len(RESULT.payload)
    intake = SampleIntake(log.connection, log.spool, always(Quotas(unread_bytes=unread(log))))
    with refused(Reason.UNREAD_QUOTA_REACHED):
        await intake.submit(sampler, 1, BODY)
    async with log.futures() as futures:
        assert isinstance(await futures.wait(A, request, 1.0), Result)
    await intake.submit(sampler, 1, BODY)
    assert unread(log) == 0


async def test_a_failed_write_of_redis_is_repeated(log: Log) -> None:
    taken: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    lost = iter([True, False])

    async def script(args: Any, /, *stored: bytes | str) -> None:
        if next(lost):
            raise CONNECTION_LOST[0]
        taken.put_nowait(args)

    deliveries = DeliveryLog(log.connection)
    deliveries._results_sent = script
    deliveries.sent(A, RequestId("r:1"), POOL, 0.0)
    telling = asyncio.create_task(repeat("flush", 0.0, deliveries.flush))
    assert await taken.get() == {"sent": [{"tenant": "a", "request": "r:1"}]}
    await stop_tasks([telling])


async def test_a_write_that_redis_refuses_for_a_while_is_repeated_afterwards(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.results.futures.FLUSH_EVERY_S", 0.01)
    run = await log.new_run()
    await log.run_all()
    # as with a disk on which Redis cannot write its RDB file
    log.redis.config_set("min-replicas-to-write", 1)
    try:
        async with log.futures() as futures:
            with capture_logs() as logs:
                assert isinstance(await futures.wait(A, RequestId(f"{run.id}:0"), 1.0), Result)
                await until(lambda: logs)
            assert logs[0]["event"] == "redis_error"
            log.redis.config_set("min-replicas-to-write", 0)
            await until(lambda: unread(log) == 0)
    finally:
        log.redis.config_set("min-replicas-to-write", 0)


async def test_only_live_sessions_are_counted(log: Log) -> None:
    records = Records(log.connection, always(Quotas(sessions=2)))
    first = await records.create_session(A, session_id=SessionId("first"))
    second = await records.create_session(A)
    with refused(Reason.SESSION_QUOTA_REACHED):
        await records.create_session(A)
    await records.create_session(A, session_id=first.id)  # a repeat of the first one
    await records.create_session(TenantId("b"))
    await records.finish(A, first.id, "success")
    third = await records.create_session(A)
    # no heartbeat for long
    log.redis.zadd(redis_keys.living_sessions(A), {second.id: 1, third.id: 1})
    await records.heartbeat(A, second.id)
    fourth = await records.create_session(A)
    living = log.redis.zrange(redis_keys.living_sessions(A), 0, -1)
    assert sorted(living) == sorted([second.id.encode(), fourth.id.encode()])
    with refused(Reason.SESSION_QUOTA_REACHED):
        await records.create_session(A)


async def test_samplers_are_counted_while_they_exist(samples: Samples) -> None:
    log = samples.log
    records = Records(log.connection, always(Quotas(samplers=2)))
    used, idle = [await records.create_sampler(sampler_record(number=n)) for n in (0, 1)]
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await records.create_sampler(sampler_record(number=2))
    assert (await records.create_sampler(sampler_record(number=1))).id == idle.id  # a repeat
    log.redis.zadd(redis_keys.tenant_samplers(A), {used.id: 1, idle.id: 1})
    await samples.submit(used, 0)  # in use: its lifetime is extended
    await records.create_sampler(sampler_record(number=3))
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await records.create_sampler(sampler_record(number=4))
    run = await log.new_run()
    await samples.save(run, 1, sampler=7)
    assert log.redis.zcard(redis_keys.tenant_samplers(A)) == 3


async def test_samplers_count_from_the_save_that_requests_them(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    intake = Intake(log.connection, log.spool, always(Quotas(samplers=1)))
    sampler, other = (sampler_record(number=number).id for number in (0, 1))
    first = await save_for(intake, run, 1, sampler)
    before = log.everything()
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await save_for(intake, run, 2, other)
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await Records(log.connection, always(Quotas(samplers=1))).create_sampler(sampler_record())
    assert await save_for(intake, run, 1, sampler) == first
    assert log.everything() == before
    log.redis.zadd(redis_keys.tenant_samplers(A), {sampler: 1})
    await save_for(intake, run, 2, other)


async def save_for(intake: Intake, run: RunRecord, seq: int, sampler: SamplerId) -> RequestId:
    return await intake.submit(run, seq, OpKind.SAVE, b"{}", 0, f"d{seq}", sampler=sampler)


async def unnamed(samples: Samples, run: RunRecord, seq: int, size: int) -> SamplerId:
    """Save without a name, and store `size` bytes."""
    await samples.save(run, seq, sampler=seq)
    samples.stored(run, seq, size)
    return sampler_record(number=seq).id


def let_rest(samples: Samples, sampler: SamplerId, rest_ms: float) -> None:
    samples.log.redis.zincrby(redis_keys.tenant_samplers(A), -rest_ms, sampler)


async def test_unused_samplers_of_unnamed_saves_are_removed_for_new_ones(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    intake = Intake(log.connection, log.spool, always(Quotas(sampler_bytes=50)))
    oldest, old, used = [await unnamed(samples, run, seq, 20) for seq in (1, 2, 3)]
    await samples.checkpoint(run, 4, "kept")  # counts as a checkpoint
    with refused(Reason.SAMPLER_QUOTA_REACHED):
        await save_for(intake, run, 5, SamplerId("s:sample:9"))
    let_rest(samples, oldest, SAMPLER_REST_MS + 2_000)
    let_rest(samples, old, SAMPLER_REST_MS + 1_000)
    await save_for(intake, run, 5, SamplerId("s:sample:9"))
    with pytest.raises(SamplerNotFound):
        await samples.records.sampler(A, oldest)
    for left in (old, used):  # the quota has space without them
        assert (await samples.records.sampler(A, left)).id == left
    assert [weights.ref for weights in samples.saved.unused_weights()] == [f"{run.id}:1"]
    assert log.redis.hgetall(redis_keys.sampler_bytes(A)) == {
        b"bytes": b"40", old.encode(): b"20", used.encode(): b"20"
    }  # fmt: skip


async def test_the_bytes_of_expired_samplers_do_not_count(samples: Samples) -> None:
    log, run = samples.log, await samples.log.new_run()
    sampler = await unnamed(samples, run, 1, 20)
    samples.stored(run, 1, 20)  # a repeat has no effect
    assert int(log.redis.hget(redis_keys.sampler_bytes(A), "bytes")) == 20
    log.redis.zadd(redis_keys.tenant_samplers(A), {sampler: 1})
    intake = Intake(log.connection, log.spool, always(Quotas(sampler_bytes=1)))
    await save_for(intake, run, 2, SamplerId("s:sample:9"))
    assert log.redis.hgetall(redis_keys.sampler_bytes(A)) == {b"bytes": b"0"}


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
