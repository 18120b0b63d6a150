"""Order of a run's ops: a missing seq_id, and ops without one, which take a position of their own."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.scheduler import Scheduler
from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Reason, RunClosed, SeqConflict
from cotrain_store.messages.ids import RequestId, TenantId, request_id
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.execution import DIGESTS_KEPT
from cotrain_store.oplog.intake import MAX_SEQ_GAP
from cotrain_store.results.pending import Pending
from cotrain_store.results.queue_notice import still_waiting
from cotrain_store.settings import SchedulerSettings
from tests.support.draws import examples
from tests.support.log import Log, open_log
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.stack import POOL

LARGE = b"x" * (INLINE_LIMIT_BYTES + 1)


@pytest.fixture
async def run(log: Log) -> RunRecord:
    """A run whose seq 1 is missing: 2 and 3 wait for it."""
    run = await log.new_run()
    await log.run_all()
    await log.submit(run, 2, body=LARGE)
    await log.submit(run, 3)
    return run


async def gaps(log: Log, older_than_s: float = -1.0) -> list[str]:
    return [run for run, _ in await log.dispatch.old_gaps(POOL, older_than_s)]


async def test_ops_after_a_gap_are_never_planned(log: Log, run: RunRecord) -> None:
    assert await log.dispatch.ready(POOL) == []
    assert await gaps(log) == [run.id]
    assert await gaps(log, older_than_s=60) == []


async def test_the_missing_request_closes_the_gap(log: Log, run: RunRecord) -> None:
    await log.submit(run, 1)
    assert await gaps(log) == []
    assert [op.seq for op in (await log.plan()).ops] == [1, 2, 3]


async def test_a_gap_that_opens_after_a_plan_is_found(log: Log, run: RunRecord) -> None:
    await log.submit(run, 5)
    await log.submit(run, 1)
    log.commit(await log.plan())
    assert await gaps(log) == [run.id]
    assert await log.dispatch.ready(POOL) == []


async def test_a_gap_keeps_its_age_while_later_ops_arrive(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.submit(run, 4)
    assert await gaps(log, older_than_s=90) == [run.id]


async def test_expiry_fails_waiting_ops_and_skips_none(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    for seq in (2, 3):
        failure = log.result(run, seq)
        assert failure is not None
        assert failure.json()["category"] == "server"
        assert "seq_id 1 of this run never reached the server" in failure.json()["error"]
        assert "a new training client from the last checkpoint" in failure.json()["error"]
    assert log.result(run, 1) is None
    assert await log.dispatch.ready(POOL) == []
    assert await gaps(log) == []
    assert log.references() == {}
    assert log.queued() == (0, 0, 0)  # they keep their seq, and wait for nothing


async def test_a_repeated_expiry_has_no_effect(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    before = log.everything()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.everything() == before


async def test_the_missing_request_runs_after_expiry_and_failed_ones_stay_failed(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    told = [log.result(run, seq) for seq in (2, 3)]
    await log.submit(run, 1)
    await log.submit(run, 4)
    step = await log.plan()
    kinds = [(op.seq, op.kind) for op in step.ops]
    passed, failed = OpKind.FORWARD_BACKWARD, OpKind.REJECTED
    assert kinds == [(1, passed), (2, failed), (3, failed), (4, passed)]
    log.commit(step)
    assert log.result(run, 1) == log.result(run, 4) == Result.of_json({"said": "done"})
    assert [log.result(run, seq) for seq in (2, 3)] == told
    assert log.queued() == (0, 0, 0)


async def test_a_failed_op_counts_again_while_it_can_run(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 5)
    await log.submit(run, 1)
    ops, tokens, _ = log.queued()
    assert (ops, tokens) == (4, 14)  # 1 and 5 are passes of 7 tokens; 2 and 3 only keep their seq
    log.commit(await log.plan())
    assert await gaps(log) == [run.id]  # seq 4
    assert log.queued()[:2] == (1, 7)
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.queued() == (0, 0, 0)


async def test_a_run_that_ends_after_its_gap_leaves_an_empty_queue(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 4)
    await log.intake.close_run(run)
    assert log.queued() == (0, 0, 0)


async def test_a_gap_that_closed_just_before_its_expiry_fails_nothing(log: Log, run: RunRecord) -> None:
    await log.submit(run, 1)
    before = log.everything()
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.everything() == before


async def test_a_request_after_an_expired_gap_is_as_late_as_those_before(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 5)
    assert log.result(run, 5) is None
    assert await gaps(log, older_than_s=90) == [run.id]
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert log.result(run, 5) is not None
    assert log.queued() == (0, 0, 0)


async def test_a_new_gap_after_a_closed_one_has_its_own_age(log: Log, run: RunRecord) -> None:
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 100) * 1000})
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    await log.submit(run, 1)
    log.commit(await log.plan())
    await log.submit(run, 5)
    assert await gaps(log) == [run.id]
    assert await gaps(log, older_than_s=90) == []


async def test_a_repeat_of_a_failed_request_gets_its_failure(log: Log, run: RunRecord) -> None:
    await log.dispatch.expire_gap(POOL, run.id, run.tenant)
    assert await log.submit(run, 3) == f"{run.id}:3"
    assert log.result(run, 3) is not None
    assert log.queued() == (0, 0, 0)


async def test_the_scheduler_expires_old_gaps_only(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    settings = SchedulerSettings(redis_url=empty_redis.url, data_dir=tmp_path, gap_limit_s=60)
    async with open_log(empty_redis.url, tmp_path) as log:
        old, young = await log.new_run("a"), await log.new_run("b")
        await log.run_all()
        for run in (old, young):
            await log.submit(run, 2)
        log.redis.zadd(redis_keys.gaps(POOL), {old.id: (time.time() - 61) * 1000})
        clock = Scheduler(log.dispatch, settings)
        ticking = asyncio.create_task(clock.run())
        async with log.futures() as futures, asyncio.timeout(120):
            assert isinstance(await futures.wait(old.tenant, request_id(old.id, 2), 30), Result)
        clock.stop()
        await ticking
        assert log.result(young, 2) is None


A = TenantId("a")


async def ride(log: Log, run: RunRecord, content: str = "r", key: str = "") -> int:
    """Submit an unnumbered op. Return its position."""
    request = await log.intake.submit(run, None, OpKind.REVERSE_KL, content.encode(), 3, content, idempotency_key=key)
    return place(request)


async def send(log: Log, run: RunRecord, seq: int) -> int:
    """Submit the client's op of that seq. Return its position."""
    content = f"op {seq}"
    request = await log.intake.submit(run, seq, OpKind.FORWARD_BACKWARD, content.encode(), 3, content)
    return place(request)


def place(request: RequestId) -> int:
    return int(request.rpartition(":")[2])


async def executed(log: Log) -> list[str]:
    """Run all runnable ops. Return the contents in the order of their execution."""
    contents: list[str] = []
    while await log.dispatch.ready(POOL):
        step = await log.plan()
        contents += [(body or b"").decode() for body in log.execution.bodies(step.ops)]
        log.commit(step)
    return [content for content in contents if not content.startswith("{")]


async def test_an_unnumbered_op_runs_after_accepted_ops_and_before_later_ones(log: Log) -> None:
    run = await log.new_run()
    assert await send(log, run, 1) == 1
    assert await ride(log, run, "one") == 2
    assert await ride(log, run, "two") == 3
    assert await send(log, run, 2) == 4
    assert await ride(log, run, "three") == 5
    assert await send(log, run, 3) == 6
    assert await executed(log) == ["op 1", "one", "two", "op 2", "three", "op 3"]


async def test_a_missing_seq_keeps_its_position(log: Log) -> None:
    run = await log.new_run()
    assert await send(log, run, 3) == 3
    assert await send(log, run, 2) == 2
    assert await ride(log, run) == 4
    assert await executed(log) == []  # it waits for earlier ops of the client
    assert await send(log, run, 4) == 5
    assert await send(log, run, 1) == 1
    assert await executed(log) == ["op 1", "op 2", "op 3", "r", "op 4"]


async def test_unnumbered_ops_with_one_key_are_one(log: Log) -> None:
    run = await log.new_run()
    once = await ride(log, run, key="k")
    await send(log, run, 1)
    before = log.everything()
    assert await ride(log, run, key="k") == once
    with pytest.raises(SeqConflict, match="This request was already used"):
        await ride(log, run, "other", key="k")
    assert log.everything() == before
    assert await ride(log, run, key="l") == 3
    assert await ride(log, run) == 4
    assert await ride(log, run) == 5  # without a key, these two count as different
    await executed(log)
    assert await ride(log, run, key="k") == once  # while its digest is kept


async def test_a_repeated_seq_after_unnumbered_ops_gets_the_same_request(log: Log) -> None:
    run = await log.new_run()
    await ride(log, run)
    once = await send(log, run, 1)
    await ride(log, run)
    await executed(log)
    log.execution.register_snapshot(run.id, 3, "file", "sha")
    before = log.everything()
    assert await send(log, run, 1) == once == 2
    assert await log.intake.repeated(run, 1, "op 1") == f"{run.id}:2"
    assert log.everything() == before


async def test_the_key_of_an_unnumbered_op_expires_with_its_digest(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.oplog.execution.DIGESTS_KEPT", 2)
    assert DIGESTS_KEPT > 2
    run = await log.new_run()
    await ride(log, run, key="k")
    for seq in (1, 2):
        await send(log, run, seq)
    await executed(log)
    log.execution.register_snapshot(run.id, 2, "older", "sha")
    log.execution.register_snapshot(run.id, 3, "newer", "sha")
    fields = set(log.redis.hkeys(redis_keys.digests(POOL, run.id)))
    assert fields == {b"1", b"2", b"3", b"key:k", b"rider:1"}
    await send(log, run, 3)
    await executed(log)
    log.execution.register_snapshot(run.id, 4, "newest", "sha")
    assert set(log.redis.hkeys(redis_keys.digests(POOL, run.id))) == {b"2", b"3", b"4"}


async def test_an_unnumbered_op_counts_against_the_limit_of_ops_ahead(log: Log) -> None:
    run = await log.new_run()
    await send(log, run, MAX_SEQ_GAP - 1)
    before = log.everything()
    with refused(Reason.SEQ_TOO_FAR, match="This request is too far ahead"):
        await ride(log, run)
    assert log.everything() == before


async def test_a_closed_run_rejects_unnumbered_ops(log: Log) -> None:
    run = await log.new_run()
    behind = await ride(log, run, key="k")
    await log.intake.close_run(run)
    with pytest.raises(RunClosed):
        await ride(log, run)
    assert await ride(log, run, key="k") == behind
    result = log.result(run, behind)
    assert result
    assert "unloaded" in result.json()["error"]
    await executed(log)
    assert log.execution.forget(run.id)
    assert not log.redis.exists(redis_keys.unnumbered_ops(POOL, run.id), redis_keys.digests(POOL, run.id))


async def test_a_gap_after_an_unnumbered_op_is_named_by_the_clients_seq(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await log.new_run()
    await ride(log, run)
    waiting = await send(log, run, 2)
    assert waiting == 3
    await executed(log)
    log.redis.zadd(redis_keys.gaps(POOL), {run.id: (time.time() - 1_000) * 1_000})
    async with log.futures() as futures:
        pending = await futures.wait(A, RequestId(f"{run.id}:{waiting}"), 0.0)
    assert isinstance(pending, Pending)
    assert pending.reason == still_waiting(1, 0.0)
    await log.dispatch.expire_gap(POOL, run.id, A)
    assert log.result(run, waiting)
    assert await send(log, run, 1) == 2  # if it arrives after all, it runs
    assert await executed(log) == ["op 1"]


#: The client's seqs in the order of their arrival, by their distance from the sorted order; then
#: the events between them: unnumbered ops (by key), repeats, cycles.
_ARRIVALS = st.lists(st.integers(0, 4), min_size=1, max_size=12)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ride"), st.sampled_from(["", "k", "l", "m"])),
        st.tuples(st.just("repeat"), st.integers(1, 12)),
        st.tuples(st.just("cycle"), st.just(0)),
        st.tuples(st.just("next"), st.just(0)),
    ),
    max_size=24,
)


@given(arrivals=_ARRIVALS, events=_EVENTS)
@settings(max_examples=examples(60), deadline=None)
def test_any_interleaving_gives_one_order_with_every_op_once(
    redis_server: EmbeddedRedis, arrivals: list[int], events: list[tuple[str, str | int]]
) -> None:
    redis_server.flush()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_interleave(redis_server.url, Path(folder), arrivals, events))


async def _interleave(url: str, folder: Path, arrivals: list[int], events: list[tuple[str, str | int]]) -> None:
    count = len(arrivals)
    waiting = sorted(range(1, count + 1), key=lambda seq: (seq + arrivals[seq - 1], seq))
    order: list[str] = []
    places: dict[str, int] = {}  # content → position
    # unnumbered op → accepted contents before it, and their highest seq
    bounds: dict[str, tuple[set[str], int]] = {}

    async with open_log(url, folder) as log:
        run = await log.new_run()

        async def accept_next() -> None:
            seq = waiting.pop(0)
            places[f"op {seq}"] = await send(log, run, seq)

        for number, (what, which) in enumerate([*events, *[("next", 0)] * count]):
            if what == "ride":
                content = f"rider {which or number}"
                found = await ride(log, run, content, key=str(which))
                if content not in places:
                    accepted = set(places)
                    highest = max((int(c[3:]) for c in accepted if c.startswith("op")), default=0)
                    bounds[content] = (accepted, highest)
                assert places.setdefault(content, found) == found
            elif what == "repeat" and f"op {which}" in places:
                assert await send(log, run, int(which)) == places[f"op {which}"]
            elif what == "cycle":
                order += await executed(log)
            elif what == "next" and waiting:
                await accept_next()
        order += await executed(log)

    assert sorted(places.values()) == list(range(1, len(places) + 1))  # one each, none free
    assert order == sorted(places, key=places.__getitem__)  # each once, in that order
    sent = [content for content in order if content.startswith("op")]
    assert sent == [f"op {seq}" for seq in range(1, count + 1)]  # the client's own in its order
    for rider, (accepted, highest) in bounds.items():
        assert all(places[before] < places[rider] for before in accepted)
        assert all(places[rider] < places[f"op {seq}"] for seq in range(highest + 1, count + 1))
