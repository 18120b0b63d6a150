"""Paused tenants and runs: their requests wait with a reason and are not lost; all others continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import RunClosed
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_store.results.futures import Pending
from cotrain_store.tenants.policies import PauseRecords, read_pauses
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.log import Log
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import Samples
from tests.support.stack import Stack, policy_was_read, worker

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
    server: Stack, engine: Engine, empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = PauseRecords(server.dispatch._redis)
    with worker(empty_redis.url, tmp_path, engine):
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
    server: Stack, engine: Engine, empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = PauseRecords(server.dispatch._redis)
    with worker(empty_redis.url, tmp_path, engine):
        held, free = await server.create("ada", "a", LORA), await server.create("ada", "b", LORA)
        await server.result(held, await server.forward_backward(held, 1, sequences(1, 1, 8)))
        await pauses.pause_run(held)
        await policy_was_read(server, monkeypatch)
        waits = await server.forward_backward(held, 2, sequences(2, 1, 8))
        await server.result(free, await server.forward_backward(free, 1, sequences(1, 1, 8)))
        await until_said(server, held, waits, "the operator has paused this run")
        await server.intake.close_run(held)
        assert (await server.result(held, waits)).json()["category"] == "user"
        assert not (await read_pauses(server.dispatch._redis)).runs
        with pytest.raises(RunClosed):
            await pauses.pause_run(held)
        assert not (await read_pauses(server.dispatch._redis)).runs


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
