"""Requests that wait and are not lost: for a paused tenant or run to resume, or for a pool's first worker to start."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import RunClosed
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_store.results.pending import Pending
from cotrain_store.tenants.policies import PauseRecords, read_pauses
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.http_api import ADMIN_KEY, OPERATOR, Api, pass_body, running_api, sample_body
from tests.support.log import Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import Samples
from tests.support.stack import MODEL, OLD, POOL, Stack, heartbeat, policy_was_read, stack, worker
from tests.support.waiting import until_true

LORA = LoraSpec(rank=2, seed=0)
ADA, BOB = TenantId("ada"), TenantId("bob")
#: A poll without a result returns the reason after this time.
POLL_S = 0.05


async def until_said(server: Stack, run: RunRecord, request: RequestId, reason: str) -> None:
    """Poll until the answer contains this reason to wait."""
    said = None
    while said != Pending("paused_capacity", reason):
        said = await server.futures.wait(run.tenant, request, POLL_S)
        assert isinstance(said, Pending), "it was not held back"


async def test_a_paused_tenant_waits_with_the_reason_until_it_is_resumed(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = PauseRecords(server.connection)
    with worker(server, engine):
        ada, bob = await server.create("ada", "a", LORA), await server.create("bob", "b", LORA)
        before = await server.forward_backward(ada, 1, sequences(1, 1, 8))
        await server.result(ada, before)
        await pauses.pause_tenant(ADA, "the bill is open")
        await policy_was_read(server, monkeypatch)
        waits = await server.forward_backward(ada, 2, sequences(2, 1, 8))
        await server.result(bob, await server.forward_backward(bob, 1, sequences(1, 1, 8)))
        await until_said(server, ada, waits, "the operator has paused this tenant: the bill is open")
        assert await pauses.resume_tenant(ADA)
        await server.result(ada, waits)
        assert not await pauses.resume_tenant(ADA)


async def test_a_paused_run_waits_alone_and_its_pause_ends_with_it(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = PauseRecords(server.connection)
    with worker(server, engine):
        held, free = await server.create("ada", "a", LORA), await server.create("ada", "b", LORA)
        await server.result(held, await server.forward_backward(held, 1, sequences(1, 1, 8)))
        await pauses.pause_run(held)
        await policy_was_read(server, monkeypatch)
        waits = await server.forward_backward(held, 2, sequences(2, 1, 8))
        await server.result(free, await server.forward_backward(free, 1, sequences(1, 1, 8)))
        await until_said(server, held, waits, "the operator has paused this run")
        await server.intake.close_run(held)
        assert (await server.result(held, waits)).json()["category"] == "user"
        assert not (await read_pauses(server.connection)).runs
        with pytest.raises(RunClosed):
            await pauses.pause_run(held)
        assert not (await read_pauses(server.connection)).runs


async def test_samples_of_a_paused_tenant_are_not_claimed_and_keep_their_turn(samples: Samples) -> None:
    pauses = PauseRecords(samples.log.connection)
    a = await samples.submit(await samples.sampler("a"), 0, 1)
    b = await samples.submit(await samples.sampler("b"), 0, 1)
    await pauses.pause_tenant(TenantId("a"))
    assert samples.claim(most=1) == [b[0]]
    assert samples.claim() == [b[1]]
    await pauses.resume_tenant(TenantId("a"))
    assert samples.claim() == a


async def test_a_pause_is_read_back_and_unknown_fields_are_ignored(log: Log) -> None:
    await PauseRecords(log.connection).pause_tenant(ADA, "why")
    log.redis.hset(redis_keys.paused_tenants(), "t", '{"since": 5.0, "colour": "red"}')
    pauses = await read_pauses(log.connection)
    assert pauses.notice(ADA) == "the operator has paused this tenant: why"
    assert pauses.notice(TenantId("t")) == "the operator has paused this tenant"
    assert pauses.notice(BOB) is None


MISSING = f'cotrain_worker_up{{pool="{MODEL}",worker="w0"}} 0.0'


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays of decisions from minutes to moments."""
    for name, seconds in (("UP_AFTER_S", 0.2), ("DOWN_AFTER_S", 0.5), ("SPAN_S", 0.1)):
        monkeypatch.setattr(f"cotrain_scheduler.scaling.{name}", seconds)
    monkeypatch.setattr("cotrain_scheduler.scheduler.DECIDE_EVERY_S", 0.05)
    monkeypatch.setattr("cotrain_workers.worker.loop.IDLE_S", 0.02)
    monkeypatch.setattr("cotrain_workers.worker.membership.HEARTBEAT_S", 0.05)


async def fleet(api: Api) -> dict[str, Any]:
    found = (await api.get("fleet", ADMIN_KEY)).json()
    (pool,) = (each for each in found["pools"] if each["base_model"] == MODEL)
    shown: dict[str, Any] = pool
    return shown


async def wants(api: Api, workers: int) -> None:
    async def is_so() -> bool:
        return bool((await fleet(api))["workers_wanted"] == workers)

    await until_true(is_so)
    page = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text
    assert f'cotrain_pool_workers_wanted{{pool="{MODEL}"}} {workers}.0' in page


async def is_serving_a_run(api: Api) -> bool:
    """Return True once the heartbeat of the only worker counts the run."""
    (shown,) = (await fleet(api))["workers"]
    return (shown["id"], shown["state"], shown["runs"]) == (OLD, "serving", 1)


async def new_session(api: Api) -> str:
    return str((await api.post("create_session", {})).json()["session_id"])


async def create(api: Api, session: str) -> Any:
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    return await api.post("create_model", {**body, "lora_config": {"rank": 4, "seed": 7}})


async def result(api: Api, request: str) -> dict[str, Any]:
    answer = await api.post("retrieve_future", {"request_id": request})
    shown: dict[str, Any] = answer.json()
    return shown


async def resolved(api: Api, request: str) -> None:
    async def is_so() -> bool:
        found = await result(api, request)
        assert "error" not in found, found
        return found.get("type") != "try_again"

    await until_true(is_so)


@pytest.mark.usefixtures("soon")
async def test_a_pool_scales_to_zero_and_back_without_rejections_or_replays(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    url = empty_redis.url
    async with (
        stack(url, tmp_path, workers_min=0, idle_after_s=0.5) as server,
        running_api(url, base_models=(MODEL,), long_poll_s=0.05) as api,
    ):
        first, second = await new_session(api), await new_session(api)
        early = await create(api, first)  # no worker has measured this base model yet
        assert (early.status_code, early.json()["code"]) == (503, "base_model_starting")
        assert float(early.headers["retry-after"]) > 0
        await wants(api, 1)
        assert (await fleet(api))["pool"] is None

        with worker(server, engine):
            run = (await create(api, first)).json()
            await resolved(api, run["request_id"])
            body = pass_body(run["model_id"], 1)
            await resolved(api, (await api.post("forward_backward", body)).json()["request_id"])
            await wants(api, 1)
            await until_true(partial(is_serving_a_run, api))
        await wants(api, 0)
        assert (await fleet(api))["workers"] == []
        assert (await api.http.get("/readyz")).json() == {"ready": True, "reasons": []}
        # Its absence is intended: no alert, and no problem on the pages.
        assert MISSING not in (await api.http.get("/metrics/fleet", headers=OPERATOR)).text
        pools = (await api.http.get("/status", headers=OPERATOR)).json()["pools"]
        assert [p["workers_unavailable"] for p in pools if p["base_model"] == MODEL] == [[]]

        asked = [
            (await api.post("forward_backward", pass_body(run["model_id"], 2))).json(),
            (await create(api, second)).json(),
        ]
        sampler = {"session_id": second, "sampling_session_seq_id": 0, "base_model": MODEL}
        handle = (await api.post("create_sampling_session", sampler)).json()
        asked.append((await api.post("asample", sample_body(handle["sampling_session_id"], 1))).json())
        for each in asked:
            assert (await result(api, each["request_id"]))["type"] == "try_again"
        await wants(api, 1)
        assert (await fleet(api))["ops"] == 2
        assert MISSING in (await api.http.get("/metrics/fleet", headers=OPERATOR)).text

        with worker(server, engine):
            for each in asked:
                await resolved(api, each["request_id"])
            assert heartbeat(redis, OLD)["restored_ops"] == 0


async def test_with_a_minimum_of_one_a_pool_without_worker_is_not_ready(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    url = empty_redis.url
    async with stack(url, tmp_path) as server, running_api(url) as api:
        with worker(server, engine):
            pass
        await wants(api, 1)
        assert (await api.get("fleet")).status_code == 404  # hidden from tenants
        ready = (await api.http.get("/readyz")).json()
        assert ready["reasons"] == ["No worker is running."]
        assert (await fleet(api))["pool"] == POOL
