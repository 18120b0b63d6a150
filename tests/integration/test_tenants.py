"""API keys: who they belong to, and that their secrets are nowhere to be found."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cotrain_store.errors import (
    BaseModelNotServed,
    ExpiredKey,
    InvalidKey,
    RunNotFound,
    SessionFinished,
    SessionNotFound,
)
from cotrain_store.keys import tenant_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.records import Records
from cotrain_store.secrets import signing_keys
from cotrain_store.tenants import CACHE_S, Tenants
from tests.support.stack import MODEL, POOL

if TYPE_CHECKING:
    from tests.support.log import Log

A, B = TenantId("a"), TenantId("b")


async def test_an_issued_key_is_its_tenant(log: Log) -> None:
    tenants = Tenants(log.connection)
    key = await tenants.issue("alice")
    tenant = await tenants.authenticate(key)
    assert tenant.name == "alice"
    assert await tenants.authenticate(key) == tenant
    second = await tenants.issue("alice's laptop", tenant=tenant.id)
    assert (await tenants.authenticate(second)).id == tenant.id
    assert (await tenants.authenticate(await tenants.issue("bob"))).id != tenant.id


async def test_no_secret_is_stored(log: Log) -> None:
    key = await Tenants(log.connection).issue("alice")
    secret = key.partition("_")[2]
    assert len(secret) >= 43  # 256 bits
    assert secret not in str(log.everything())


async def test_a_wrong_or_unknown_key_is_refused_alike(log: Log) -> None:
    tenants = Tenants(log.connection)
    key = await tenants.issue("alice")
    for wrong in (
        key[:-1],
        key + "x",
        "tml-unknown_secret",
        "tml-",
        "",
        "sk-x",
        key + "\n",
        "\ud800",
    ):
        with pytest.raises(InvalidKey) as refusal:
            await tenants.authenticate(wrong)
        assert str(refusal.value) == "Invalid API key."


async def test_a_key_stops_at_its_time(log: Log) -> None:
    tenants = Tenants(log.connection)
    with pytest.raises(ExpiredKey):
        await tenants.authenticate(await tenants.issue("alice", not_after=time.time() - 1))
    await tenants.authenticate(await tenants.issue("alice", not_after=time.time() + 99))


async def test_a_revoked_key_stops_within_the_cache_time(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Tenants(log.connection), Tenants(log.connection)
    key = await here.issue("alice")
    await there.authenticate(key)
    key_id = key.removeprefix("tml-").partition("_")[0]
    assert [record.id for record in await here.list_keys()] == [key_id]
    assert await here.revoke(key_id)
    assert not await here.revoke(key_id)
    with pytest.raises(InvalidKey):
        await here.authenticate(key)
    later = time.monotonic() + CACHE_S
    monkeypatch.setattr("cotrain_store.tenants.time.monotonic", lambda: later)
    with pytest.raises(InvalidKey):
        await there.authenticate(key)
    assert await here.list_keys() == []


async def test_a_key_the_operator_chose_is_one_tenant_for_ever(log: Log) -> None:
    tenants = Tenants(log.connection)
    for key in ("tml-lab_secret", "tml-dev", "tml-a.b_c.d"):
        tenant = await tenants.register(key, "lab")
        assert await tenants.register(key, "lab") == tenant
        assert await tenants.authenticate(key) == tenant
    with pytest.raises(InvalidKey, match="another secret"):
        await tenants.register("tml-lab_other", "lab")
    for malformed in ("lab", "tml-", "tml-with space", "xx-other_secret", "sk-lab_secret"):
        with pytest.raises(InvalidKey):
            await tenants.register(malformed, "lab")


async def test_a_key_may_start_with_sk(log: Log) -> None:
    tenants = Tenants(log.connection)
    key = await tenants.issue("alice", prefix="sk")
    assert key.startswith("sk-")
    tenant = await tenants.authenticate(key)
    assert tenant.name == "alice"
    with pytest.raises(InvalidKey):
        await tenants.authenticate("tml-" + key.removeprefix("sk-"))
    for chosen in ("sk-lab_secret", "sk-dev"):
        registered = await tenants.register(chosen, "lab")
        assert await tenants.authenticate(chosen) == registered


async def test_a_shown_key_is_told_by_its_id_and_lives_until_it_is_revoked(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Tenants(log.connection), Tenants(log.connection)
    shown = await here.issue("alice")
    record = await here.key(shown)
    assert [record] == await here.list_keys()
    assert shown.startswith(f"tml-{record.id}_")
    assert await here.is_live(record.id)
    assert await there.is_live(record.id)
    await here.revoke(record.id)
    assert not await here.is_live(record.id)
    later = time.monotonic() + CACHE_S
    monkeypatch.setattr("cotrain_store.tenants.time.monotonic", lambda: later)
    assert not await there.is_live(record.id)


async def test_a_key_is_not_live_after_its_time_nor_if_nobody_has_it(log: Log) -> None:
    tenants = Tenants(log.connection)
    await tenants.issue("alice", not_after=time.time() - 1)
    (record,) = await tenants.list_keys()
    assert not await tenants.is_live(record.id)
    assert not await tenants.is_live("nobody")


async def test_what_signs_links_is_made_once(log: Log) -> None:
    both = await asyncio.gather(*(signing_keys(log.connection) for _ in range(8)))
    current, previous = both[0]
    assert set(both) == {(current, previous)}
    assert current != previous
    assert (len(current), len(previous)) == (32, 32)


async def test_keys_are_listed_oldest_first(log: Log) -> None:
    tenants = Tenants(log.connection)
    names = ["first", "second", "third"]
    for name in names:
        await tenants.issue(name)
    records = await tenants.list_keys()
    assert [record.name for record in records] == names
    assert all(record.not_after is None for record in records)


async def test_a_session_belongs_to_its_tenant(log: Log) -> None:
    records = Records(log.connection)
    session = await records.create_session(A, tags=("x",), user_metadata={"k": [1]})
    assert await records.session(A, session.id) == session
    listed = log.redis.zrange(tenant_keys.tenant_sessions(A), 0, -1, withscores=True)
    assert listed == [(session.id.encode(), session.created_at)]
    with pytest.raises(SessionNotFound) as foreign:
        await records.session(B, session.id)
    with pytest.raises(SessionNotFound) as unknown:
        await records.session(B, "0" * 32)
    assert str(foreign.value) == str(unknown.value)
    for act in (records.beat(B, session.id), records.finish(B, session.id, "errored")):
        with pytest.raises(SessionNotFound):
            await act


async def test_a_finished_session_stays_finished_and_names_its_runs(log: Log) -> None:
    records = Records(log.connection)
    session = await records.create_session(A)
    await records.beat(A, session.id)
    run = await log.new_run("a", session.id)
    assert await records.finish(A, session.id, "success") == (run.id,)
    first = (await records.session(A, session.id)).finished_at
    assert await records.finish(A, session.id, "errored") == (run.id,)
    assert (await records.session(A, session.id)).finished_at == first
    with pytest.raises(SessionFinished):
        await records.beat(A, session.id)


@pytest.mark.parametrize(
    "suffix", [":beat", ":runs", "\n", "\ud800", ":train:0:0", " ", "/../x", "*", ":train:"]
)
async def test_an_id_that_none_of_ours_has_is_not_found(log: Log, suffix: str) -> None:
    records = Records(log.connection)
    session = await records.create_session(A)
    await log.new_run("a", session.id)
    with pytest.raises(SessionNotFound):
        await records.session(A, session.id + suffix)
    with pytest.raises(RunNotFound):
        await records.run(A, session.id + suffix)


async def test_a_run_belongs_to_its_tenant(log: Log) -> None:
    records = Records(log.connection)
    run = await log.new_run("a")
    found = await records.run(A, run.id)
    assert found.last_request_at == pytest.approx(time.time(), abs=60)
    assert replace(found, last_request_at=None) == run
    with pytest.raises(RunNotFound):
        await records.run(B, run.id)


async def test_a_base_model_that_is_not_served_is_refused_naming_those_that_are(log: Log) -> None:
    records = Records(log.connection)
    assert (await records.pool_of(MODEL)).id == POOL
    with pytest.raises(BaseModelNotServed, match=f"'gpt' is not served here. Available: {MODEL}"):
        await records.pool_of("gpt")
    assert await records.pool(POOL) == (await records.pools())[0]
