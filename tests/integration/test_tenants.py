"""API keys: who they belong to, and that their secrets are nowhere to be found."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import BaseModelNotServed, ExpiredKey, InvalidKey, KeyInSettings, Reason, RunNotFound
from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.api_keys import CACHE_S, ChosenKey, Tenants, read_chosen_keys, signing_keys
from cotrain_store.tenants.policies import Policies
from cotrain_store.tenants.records import Records
from tests.support.log import Log
from tests.support.refusals import refused
from tests.support.stack import MODEL, POOL

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
    for wrong in (key[:-1], key + "x", "tml-unknown_secret", "tml-", "", "sk-x", key + "\n", "\ud800"):
        with pytest.raises(InvalidKey) as refusal:
            await tenants.authenticate(wrong)
        assert str(refusal.value) == "Invalid API key."


async def test_a_key_stops_at_its_time(log: Log) -> None:
    tenants = Tenants(log.connection)
    with pytest.raises(ExpiredKey):
        await tenants.authenticate(await tenants.issue("alice", not_after=time.time() - 1))
    await tenants.authenticate(await tenants.issue("alice", not_after=time.time() + 99))


async def test_a_key_that_is_cached_stops_at_its_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, now = Tenants(log.connection), time.time()
    key = await tenants.issue("alice", not_after=now + 1)
    record = await tenants.key(key)
    assert await tenants.live_key(record.id)
    monkeypatch.setattr("cotrain_store.tenants.api_keys.time.time", lambda: now + 2)
    with pytest.raises(ExpiredKey):
        await tenants.authenticate(key)
    assert not await tenants.live_key(record.id)


async def test_a_revoked_key_stops_within_the_cache_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("cotrain_store.tenants.api_keys.time.monotonic", lambda: later)
    with pytest.raises(InvalidKey):
        await there.authenticate(key)
    assert await here.list_keys() == []


LAB, DEV = "tml-lab_secret-of-the-lab", "sk-0123456789abcdef"


def chosen(*entries: str) -> tuple[ChosenKey, ...]:
    return read_chosen_keys(entries)


async def test_a_chosen_key_is_one_tenant_for_ever_in_every_process(log: Log) -> None:
    here, there = Tenants(log.connection), Tenants(log.connection)
    await asyncio.gather(here.set_chosen_keys(chosen(LAB, DEV)), there.set_chosen_keys(chosen(f"lab={LAB}", DEV)))
    for key in (LAB, DEV):
        assert (await here.key(key)).id == (await there.key(key)).id
        assert (await here.key(key)).tenant == (await there.key(key)).tenant
    assert (await here.key(LAB)).tenant != (await here.key(DEV)).tenant
    assert (await there.authenticate(LAB)).name == "lab"
    assert (await here.authenticate(LAB)).name == "key lab_…"


async def test_a_key_is_good_as_long_as_it_stands_in_the_settings(log: Log) -> None:
    before = Tenants(log.connection)
    await before.set_chosen_keys(chosen(LAB, DEV))
    lab = await before.key(LAB)
    laptop = await before.issue("laptop", tenant=lab.tenant)
    after = Tenants(log.connection)
    assert await after.set_chosen_keys(chosen(DEV)) == [lab]
    with pytest.raises(InvalidKey):
        await after.key(LAB)
    assert not await after.live_key(lab.id)
    assert (await after.key(laptop)).tenant == lab.tenant
    assert [key.name for key in await after.list_keys()] == ["key 0123…", "laptop"]
    again = Tenants(log.connection)
    assert await again.set_chosen_keys(chosen(LAB)) == [await after.key(DEV)]
    assert await again.key(LAB) == lab
    assert await again.live_key(lab.id)


async def test_no_process_takes_a_key_of_anothers_settings(log: Log) -> None:
    here, there = Tenants(log.connection), Tenants(log.connection)
    await here.set_chosen_keys(chosen(LAB))
    with pytest.raises(InvalidKey):
        await there.key(LAB)
    assert (await here.key(LAB)).in_settings


async def test_a_chosen_key_is_taken_back_in_the_settings_and_says_so(log: Log) -> None:
    tenants = Tenants(log.connection)
    await tenants.set_chosen_keys(chosen(LAB))
    (record,) = await Tenants(log.connection).list_keys()
    assert record.in_settings
    with pytest.raises(KeyInSettings, match="Remove it from --api-key, COTRAIN_API_KEYS"):
        await Tenants(log.connection).revoke(record.id)
    assert await tenants.key(LAB) == record


async def test_of_a_chosen_key_nothing_is_shown_that_leads_back_to_it(log: Log) -> None:
    tenants = Tenants(log.connection)
    await tenants.set_chosen_keys(chosen(LAB))
    record = await tenants.key(LAB)
    digest = hashlib.sha256(LAB.encode()).hexdigest()
    for shown in (record.id, record.tenant):
        assert shown.removeprefix("t-")[:8] not in digest
    assert record.prefix == "tml-lab_"
    assert LAB not in str(log.everything())


async def test_a_key_may_start_with_sk(log: Log) -> None:
    tenants = Tenants(log.connection)
    key = await tenants.issue("alice", prefix="sk")
    assert key.startswith("sk-")
    tenant = await tenants.authenticate(key)
    assert tenant.name == "alice"
    assert key.startswith((await tenants.key(key)).prefix)
    with pytest.raises(InvalidKey):
        await tenants.authenticate("tml-" + key.removeprefix("sk-"))


async def test_a_shown_key_is_told_by_its_id_and_lives_until_it_is_revoked(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Tenants(log.connection), Tenants(log.connection)
    shown = await here.issue("alice")
    record = await here.key(shown)
    assert [record] == await here.list_keys()
    assert shown.startswith(f"tml-{record.id}_")
    assert await here.live_key(record.id)
    assert await there.live_key(record.id)
    await here.revoke(record.id)
    assert not await here.live_key(record.id)
    later = time.monotonic() + CACHE_S
    monkeypatch.setattr("cotrain_store.tenants.api_keys.time.monotonic", lambda: later)
    assert not await there.live_key(record.id)


async def test_a_key_is_not_live_after_its_time_nor_if_nobody_has_it(log: Log) -> None:
    tenants = Tenants(log.connection)
    await tenants.issue("alice", not_after=time.time() - 1)
    (record,) = await tenants.list_keys()
    assert not await tenants.live_key(record.id)
    assert not await tenants.live_key("unknown")


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
    listed = log.redis.zrange(redis_keys.tenant_sessions(A), 0, -1, withscores=True)
    assert listed == [(session.id.encode(), session.created_at)]
    with refused(Reason.SESSION_NOT_FOUND) as foreign:
        await records.session(B, session.id)
    with refused(Reason.SESSION_NOT_FOUND) as unknown:
        await records.session(B, "0" * 32)
    assert str(foreign.value) == str(unknown.value)
    for act in (records.heartbeat(B, session.id), records.finish(B, session.id, "errored")):
        with refused(Reason.SESSION_NOT_FOUND):
            await act


async def test_a_finished_session_stays_finished_and_names_its_runs(log: Log) -> None:
    records = Records(log.connection)
    session = await records.create_session(A)
    await records.heartbeat(A, session.id)
    run = await log.new_run("a", session.id)
    assert await records.finish(A, session.id, "success") == (run.id,)
    first = (await records.session(A, session.id)).finished_at
    assert await records.finish(A, session.id, "errored") == (run.id,)
    assert (await records.session(A, session.id)).finished_at == first
    with refused(Reason.SESSION_FINISHED):
        await records.heartbeat(A, session.id)


@pytest.mark.parametrize("suffix", [":beat", ":runs", "\n", "\ud800", ":train:0:0", " ", "/../x", "*", ":train:"])
async def test_an_id_that_none_of_ours_has_is_not_found(log: Log, suffix: str) -> None:
    records = Records(log.connection)
    session = await records.create_session(A)
    await log.new_run("a", session.id)
    with refused(Reason.SESSION_NOT_FOUND):
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


async def test_a_run_is_listed_from_its_first_request_and_says_when_its_last_was(log: Log) -> None:
    records, run = Records(log.connection), await log.new_run()
    listed = log.redis.zrange(redis_keys.training_runs(run.tenant), 0, -1, withscores=True)
    assert listed == [(run.id.encode(), run.created_at)]
    log.redis.hset(redis_keys.run(run.id), "last_request_at", "1.5")
    assert (await records.run(run.tenant, run.id)).last_request_at == 1.5
    await log.submit(run, 2)
    later = (await records.run(run.tenant, run.id)).last_request_at
    assert later
    assert later > 1.5
    log.redis.hset(redis_keys.run(run.id), "last_request_at", "1.5")
    await log.submit(run, 2)  # a repeat is no request
    assert (await records.run(run.tenant, run.id)).last_request_at == 1.5


async def test_a_base_model_that_is_not_served_is_refused_naming_those_that_are(log: Log) -> None:
    records = Records(log.connection)
    assert (await records.pool_of(MODEL)).id == POOL
    with pytest.raises(BaseModelNotServed, match=f"'gpt' is not served here. Available: {MODEL}"):
        await records.pool_of("gpt")
    assert await records.pool(POOL) == (await records.pools())[0]


async def test_limits_are_set_and_taken_back_in_one_write(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies, or a Redis that is lost, between two commands would leave the half of a change."""
    policies = Policies(log.connection)
    await policies.set_limits(A, {"ops": 10**15, "runs": 7})
    sent = []
    execute = log.connection.execute_command

    async def counted(*args: Any, **options: Any) -> Any:
        sent.append(args[0])
        return await execute(*args, **options)

    monkeypatch.setattr(log.connection, "execute_command", counted)
    await policies.set_limits(A, {"tokens": 9, "runs": None})
    assert sent == ["EVALSHA"]  # behind which replicas are waited for
    assert await policies.limits(A) == {"ops": 10**15, "tokens": 9}
    await policies.set_limits(A, {"ops": None, "tokens": None})
    assert await policies.limits(A) == {}
