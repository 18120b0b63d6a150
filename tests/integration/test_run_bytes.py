"""Bytes of a tenant's runs, which count until the last file is deleted, and the rest that an unloaded run leaves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.capacity import Capacity
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import RunId, SessionId, TenantId
from cotrain_store.messages.runs import LoraSpec, RunRecord, pool_record
from cotrain_store.oplog.intake import Intake
from cotrain_store.tenants.policies import run_bytes, state_bytes
from cotrain_store.tenants.quotas import Quotas
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.limits import always
from tests.support.lives import pass_time
from tests.support.log import Log, record_of
from tests.support.program import results, submit
from tests.support.refusals import refused
from tests.support.stack import POOL, Stack, pool_record_for_tests, snapshots, worker
from tests.support.waiting import files_below, until

#: One value for each unit of rank and module: a run of rank 1 has a state of 1,600 bytes.
WIDTHS = {"attn": 30, "mlp": 30, "unembed": 40}
STATE = 1_600
A = TenantId("a")


@pytest.fixture
def log(log: Log) -> Log:
    log.execution.publish(replace(pool_record_for_tests(), lora_widths=WIDTHS))
    return log


def runs_of(tenant: str, count: int) -> list[RunRecord]:
    run = record_of(tenant)
    return [replace(run, id=RunId(f"{run.session}:train:{n}")) for n in range(count)]


def intake_of(log: Log, run_bytes: int = 0) -> Intake:
    return Intake(log.connection, log.spool, always(Quotas(run_bytes=run_bytes)))


def claimed(log: Log) -> int:
    return int(log.redis.get(redis_keys.unwritten_run_bytes()) or 0)


async def weight(log: Log, tenant: TenantId = A) -> int:
    return await run_bytes(log.connection, tenant)


async def drop(log: Log, run: RunRecord) -> None:
    """Unload a run that its worker has."""
    await log.intake.close_run(run)
    assert log.execution.forget(run.id)


async def test_a_run_that_would_hold_too_much_is_not_made_until_another_one_is_dropped(log: Log) -> None:
    intake = intake_of(log, run_bytes=7 * STATE)
    first, second, third = runs_of("a", 3)
    await intake.create_run(first)
    await intake.create_run(second)
    await intake.create_run(first)  # twice is harmless
    before = log.everything()
    with refused(
        Reason.RUN_BYTES_QUOTA_REACHED,
        match=r"The runs of this tenant hold 9600 bytes, and this run would hold 4800\. The quota run_bytes of "
        r"this tenant is 11200\. Unload some\.",
    ):
        await intake.create_run(third)
    assert log.everything() == before
    await intake.create_run(runs_of("b", 1)[0])
    await log.run_all()
    await log.intake.close_run(first)
    with refused(Reason.RUN_BYTES_QUOTA_REACHED):  # its files are still there
        await intake.create_run(third)
    assert log.execution.forget(first.id)
    await intake.create_run(third)


async def test_a_run_that_alone_holds_more_than_all_may_is_refused_for_good(log: Log) -> None:
    with refused(Reason.RUN_TOO_LARGE, match="A run of this rank holds 4800 bytes. The quota run_bytes of"):
        await intake_of(log, run_bytes=4_799).create_run(record_of("a"))


async def test_what_is_accepted_of_a_run_is_never_refused_for_its_weight(log: Log) -> None:
    run = await log.new_run()
    intake = intake_of(log, run_bytes=1)
    await intake.create_run(run)
    log.intake = intake
    await log.submit(run, 1)
    await log.run_all()


async def test_nothing_is_left_of_it_when_runs_are_gone(log: Log) -> None:
    planned, unplanned = runs_of("a", 2)
    await log.intake.create_run(planned)
    await log.run_all()
    await log.intake.create_run(unplanned)
    assert await weight(log) == 6 * STATE
    assert claimed(log) == 4 * STATE
    await log.intake.close_run(unplanned)  # no worker has it
    assert (await weight(log), claimed(log)) == (3 * STATE, 2 * STATE)
    for _ in range(2):
        await drop(log, planned)
    assert log.redis.zrange(redis_keys.run_bytes(), 0, -1) == []
    assert claimed(log) == 0


async def test_room_on_the_disk_is_claimed_until_both_copies_are_there(log: Log) -> None:
    run = await log.new_run()
    for seq, left in ((1, STATE), (2, 0), (3, 0)):
        await log.submit(run, seq)
        await log.run_all()
        assert log.execution.register_snapshot(run.id, seq, f"f{seq}", "sha", STATE)
        assert claimed(log) == left
    assert await weight(log) == 3 * STATE
    await drop(log, run)
    assert (await weight(log), claimed(log)) == (0, 0)


async def test_one_tenant_takes_no_more_than_three_quarters_of_what_is_free(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = 2 * STATE
    monkeypatch.setattr(Capacity, "free_disk_bytes", 8 * copies)
    for run in runs_of("a", 6):
        await log.intake.create_run(run)
    with refused(
        Reason.RUN_BYTES_QUOTA_REACHED,
        match=r"The runs of this tenant hold 28800 bytes, and this run would hold 4800\. The disk has 6400 bytes "
        r"left for the runs of all tenants",
    ):
        await log.intake.create_run(runs_of("a", 7)[-1])
    other = runs_of("b", 2)
    await log.intake.create_run(other[0])
    with refused(Reason.RUN_BYTES_QUOTA_REACHED):
        await log.intake.create_run(other[1])


async def test_a_disk_without_room_for_copies_takes_no_run(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[Any] = [0, 2 * STATE, 3 * STATE]
    for there in free:
        monkeypatch.setattr(Capacity, "free_disk_bytes", there)
        if there < 3 * STATE:
            with refused(Reason.RUN_BYTES_QUOTA_REACHED):
                await log.new_run()
    await log.new_run()


async def test_a_run_writes_the_copies_it_was_weighed_for_and_leaves_none(
    server: Stack, tmp_path: Path, engine: Engine
) -> None:
    lora = LoraSpec(rank=32, seed=0, train_unembed=False)
    tuning = snapshots(ops=1)
    with worker(server, engine, tuning=tuning) as loop:
        redis = loop._execution._redis
        run = await server.create("a", "a", lora)
        for first, last in ((1, 1), (2, 3)):  # a forward alone is copied for nothing
            await results(server, run, await submit(server, run, first, last))
            await until(lambda: redis.hget(redis_keys.log(POOL, run.id), "snap") == b"%d" % last)  # noqa: B023
        expected = state_bytes(lora, pool_record(redis.hget(redis_keys.pools(), POOL)))
        copies = list((tmp_path / "snapshots").glob("*/*.safetensors"))
        assert [copy.stat().st_size for copy in copies] == [pytest.approx(expected, rel=0.01)] * 2
        assert int(redis.zscore(redis_keys.run_bytes(), "a")) == 3 * expected
        assert int(redis.get(redis_keys.unwritten_run_bytes())) == 0
        await server.intake.close_run(run)
        await until(lambda: redis.zscore(redis_keys.run_bytes(), "a") is None)
        await until(lambda: not files_below(tmp_path / "snapshots", ".safetensors"))


LORA = LoraSpec(rank=4, seed=7, train_unembed=False)
#: Kept permanently, counted by the quota `record_bytes`; `docs/operate/limits.md` lists them.
REMAINS = ["cotrain:run:<run>", "cotrain:session:<session>:runs", f"cotrain:{{{POOL}}}:log:<run>"]
#: Also kept for a run that trained, under the quota `history_points`.
HISTORY = ["cotrain:run:<run>:history", "cotrain:run:<run>:steps"]


async def train(server: Stack, redis: Any, session: str) -> RunRecord:
    """Make a run with bodies in Redis and in the spool, two snapshots, and unread results."""
    run = await server.create("a", session, LORA)
    for seq, length in ((1, 9), (3, 300)):
        request = await server.forward_backward(run, seq, sequences(seq, 8, length))
        await server.result(run, request)
        await server.result(run, await server.optim_step(run, seq + 1))
    await until(lambda: len(copies_of(redis, run)) == 2)
    return run


def copies_of(redis: Any, run: RunRecord) -> list[bytes]:
    files = redis.hmget(f"cotrain:{{{POOL}}}:log:{run.id}", "snapfile", "oldfile")
    return [file for file in files if file]


def described(redis: Any, run: RunRecord | None = None) -> list[str]:
    """Return all keys; those of a run with placeholders."""
    names = [name.decode() for name in redis.keys("*")]
    if run is None:
        return sorted(names)
    of_run = [name for name in names if run.session in name]
    return sorted(name.replace(run.id, "<run>").replace(run.session, "<session>") for name in of_run)


async def test_an_unloaded_run_leaves_only_its_record(server: Stack, tmp_path: Path, engine: Engine) -> None:
    tuning = snapshots(ops=1)
    folder = tmp_path / "snapshots"
    with worker(server, engine, tuning=tuning) as loop:
        redis = loop._execution._redis
        first = await train(server, redis, "session-0")
        await server.intake.close_run(first)
        await until(lambda: not list(folder.iterdir()))
        before = [name for name in described(redis) if "session-0" not in name]
        runs = [await train(server, redis, f"session-{number}") for number in (1, 2, 3)]
        await until(lambda: len(list(folder.glob("*/*.safetensors"))) == 6)
        # Only now: a snapshot of it would be a seventh file.
        untrained = await server.create("a", "session-4", LORA)
        for run in (*runs, untrained):
            await server.intake.close_run(run)
        await until(lambda: redis.zcard(redis_keys.run_bytes()) == 0)
        await until(lambda: not list(folder.iterdir()))  # nor does a folder remain
        pass_time(redis, redis_keys.SMALL_RESULT_TTL_MS + 1)
        await until(lambda: not redis.keys("cotrain:result:*"))  # the scheduler expires them
        await until(lambda: described(redis, untrained) == REMAINS)
        for run in runs:
            assert described(redis, run) == sorted(REMAINS + HISTORY)
            assert set(redis.hkeys(f"cotrain:{{{POOL}}}:log:{run.id}")) <= POSITION
        now = [
            name
            for name in described(redis)
            if not re.search(r"session-\d|:minute:", name)  # the minute may have changed
        ]
        assert set(now) <= {*before, *UNREAD}
        assert redis.hlen(redis_keys.spool_segment_refs()) == 0
        assert redis.hlen(redis_keys.spool_results()) == 0
        assert run_ids(redis, SessionId("session-1")) == [runs[0].id]
        for run in runs:
            assert run.id not in engine.adapters


def run_ids(redis: Any, session: SessionId) -> list[RunId]:
    return [RunId(name.decode()) for name in redis.smembers(redis_keys.session_runs(session))]


#: Fields of a deleted log: its position and its owner.
POSITION = {
    b"state", b"tenant", b"next", b"done", b"snap", b"last", b"worker", b"oldsnap",
    b"oldnumerics", b"numerics",
}  # fmt: skip
#: Removed at the next request of their tenant.
UNREAD = ["cotrain:tenant:a:unread", "cotrain:tenant:a:unread_until", "cotrain:tenants:unread"]
