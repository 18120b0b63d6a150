"""The scripts against a plain model of the log, step by step, on a real Redis (hypothesis).

The model is what a reader would expect: a dict of ops per run, two cursors, a set of results.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from cotrain_scheduler.planner import runnable_prefix
from cotrain_store import keys
from cotrain_store.connection import open_connection, open_sync_connection
from cotrain_store.dispatch import Dispatch
from cotrain_store.errors import Fenced, PlanOutdated, RunClosed, SeqConflict, SeqTooFar
from cotrain_store.execution import Execution
from cotrain_store.intake import MAX_AHEAD, Intake, TenantLimits
from cotrain_store.messages import (
    LoraSpec,
    OpKind,
    Result,
    RunRecord,
    SessionId,
    Step,
    TenantId,
    WorkerId,
    request_id,
    run_id,
)
from cotrain_store.spool import INLINE_LIMIT_BYTES, Spool, new_writer
from tests.support.stack import MODEL, POOL, pool_record_for_tests

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.support.redis_server import EmbeddedRedis

RUNS = 3
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)
KINDS = st.sampled_from([*PASSES, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.LOAD])


@dataclass
class RunModel:
    """What the log of one run must look like."""

    accepted: dict[int, tuple[str, OpKind, int]] = field(default_factory=dict)
    next: int = 0
    done: int = -1
    snap: int = -1
    cut: int = -1
    closed: bool = False
    dead: set[int] = field(default_factory=set)
    """Accepted ops that were failed because the run was closed."""


class LogMachine(RuleBasedStateMachine):
    """Drive intake, dispatch and execution; after every step the log equals the model."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.server.flush()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.redis = open_sync_connection(self.server.url)
        self.async_redis = open_connection(self.server.url)
        self.spool = Spool(folder / "spool", new_writer("t"))
        self.intake = Intake(self.async_redis, self.spool, TenantLimits(ops=10_000))
        self.dispatch = Dispatch(self.async_redis, "scheduler-0")
        assert self.wait(self.dispatch.lead())
        self.execution = self.new_worker()
        self.open: Step | None = None
        self.cycle = 0
        self.models = [RunModel() for _ in range(RUNS)]
        self.records = [self.record(number) for number in range(RUNS)]
        for model, record in zip(self.models, self.records, strict=True):
            self.wait(self.intake.create_run(record))
            model.accepted[0] = ("", OpKind.CREATE, 0)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def new_worker(self) -> Execution:
        execution = Execution(self.redis, self.spool, self.spool, POOL, WorkerId("w0"))
        execution.enter(pool_record_for_tests())
        return execution

    def record(self, number: int) -> RunRecord:
        session = SessionId(f"s{number}")
        return RunRecord(
            run_id(session, 0), TenantId(f"t{number % 2}"), session, POOL, MODEL,
            LoraSpec(rank=1, seed=0), time.time(),
        )  # fmt: skip

    @rule(
        number=st.integers(0, RUNS - 1),
        seq=st.integers(1, 12),
        kind=KINDS,
        content=st.sampled_from(["x", "y"]),
        large=st.booleans(),
    )
    def submit(self, number: int, seq: int, kind: OpKind, content: str, large: bool) -> None:
        model, record = self.models[number], self.records[number]
        body = content.encode() * (INLINE_LIMIT_BYTES + 1 if large else 1)
        tokens = 7 if kind in PASSES else 0
        known = model.accepted.get(seq)
        call = self.intake.submit(record, seq, kind, body, tokens, content)
        if known:
            if known[0] == content:
                assert self.wait(call) == f"{record.id}:{seq}"
            else:
                with pytest.raises(SeqConflict):
                    self.wait(call)
        elif model.closed:
            with pytest.raises(RunClosed):
                self.wait(call)
        else:
            assert self.wait(call) == f"{record.id}:{seq}"
            model.accepted[seq] = (content, kind, tokens)

    @rule(number=st.integers(0, RUNS - 1))
    def submit_far_ahead(self, number: int) -> None:
        model, record = self.models[number], self.records[number]
        far = model.done + MAX_AHEAD + 1
        expected = RunClosed if model.closed else SeqTooFar
        with pytest.raises(expected):
            self.wait(self.intake.submit(record, far, OpKind.FORWARD, b"", 1, "z"))

    @precondition(lambda self: self.open is None)
    @rule(most=st.integers(1, 6))
    def plan(self, most: int) -> None:
        queues = self.wait(self.dispatch.ready(POOL))
        ready = {queue.run for queue in queues}
        for model, record in zip(self.models, self.records, strict=True):
            can_go_on = not model.closed and model.next in model.accepted
            assert (record.id in ready) == can_go_on
        ops = [op for queue in queues for op in runnable_prefix(queue.ops)[:most]]
        if not ops:
            return
        tenants = {record.id: record.tenant for record in self.records}
        step = Step(self.cycle + 1, WorkerId("w0"), tuple(ops), time.time(), tenants)
        self.wait(self.dispatch.plan(POOL, step))
        self.cycle += 1
        self.open = step
        for op in ops:
            model = self.models[self.number(op.run)]
            assert op.seq == model.next  # no run reordered, no gap skipped
            model.next += 1

    @precondition(lambda self: self.open is not None)
    @rule()
    def plan_of_the_past_is_refused(self) -> None:
        assert self.open is not None
        again = Step(self.cycle + 1, WorkerId("w0"), self.open.ops, 0.0, self.open.tenant_by_run)
        with pytest.raises(PlanOutdated):
            self.wait(self.dispatch.plan(POOL, again))

    @precondition(lambda self: self.open is not None)
    @rule(twice=st.booleans())
    def commit(self, twice: bool) -> None:
        assert self.open is not None
        assert self.execution.open_steps() == [self.open]
        step, self.open = self.open, None
        results = {(op.run, op.seq): Result.of_json({"seq": op.seq}) for op in step.ops}
        for _ in range(1 + twice):
            self.execution.commit(step, results, {"cycle": step.cycle}, {"cycles": 1})
        event("committed")
        for op in step.ops:
            self.models[self.number(op.run)].done = op.seq

    @precondition(lambda self: self.open is not None)
    @rule()
    def a_replaced_worker_commits_nothing(self) -> None:
        assert self.open is not None
        old, self.execution = self.execution, self.new_worker()
        results = {(op.run, op.seq): Result.of_json({"old": True}) for op in self.open.ops}
        with pytest.raises(Fenced):
            old.commit(self.open, results, {}, {})
        with pytest.raises(Fenced):
            old.register_snapshot(self.records[0].id, 0, "f", "s")
        assert self.execution.open_steps() == [self.open]

    @rule()
    def a_replaced_scheduler_plans_nothing(self) -> None:
        old = self.dispatch
        self.wait(old.resign())
        self.dispatch = Dispatch(self.async_redis, "scheduler-1")
        assert self.wait(self.dispatch.lead())
        step = Step(self.cycle + 1, WorkerId("w0"), (), 0.0, {})
        with pytest.raises(Fenced):
            self.wait(old.plan(POOL, step))
        self.wait(self.dispatch.resign())
        self.dispatch = Dispatch(self.async_redis, "scheduler-0")
        assert self.wait(self.dispatch.lead())

    @rule(number=st.integers(0, RUNS - 1), back=st.integers(0, 3))
    def snapshot(self, number: int, back: int) -> None:
        model, record = self.models[number], self.records[number]
        seq = model.done - back
        registered = self.execution.register_snapshot(record.id, seq, f"f{seq}", "sha")
        assert registered == (model.snap < seq <= model.done)
        if registered:
            event("snapshot registered")
            model.cut, model.snap = model.snap, seq

    @rule(number=st.integers(0, RUNS - 1))
    def close(self, number: int) -> None:
        model, record = self.models[number], self.records[number]
        self.wait(self.intake.close_run(record))
        if not model.closed:
            event("run closed")
            model.closed = True
            model.dead = {seq for seq in model.accepted if seq >= model.next}

    @invariant()
    def the_log_equals_the_model(self) -> None:
        queued: dict[str, list[int]] = {"t0": [0, 0], "t1": [0, 0]}
        for model, record in zip(self.models, self.records, strict=True):
            row = self.redis.hgetall(keys.log(POOL, record.id))
            assert int(row[b"next"]) == model.next
            assert int(row[b"done"]) == model.done
            assert model.snap <= model.done < model.next or model.next == model.done + 1
            live = {s for s in model.accepted if s > model.cut and s not in model.dead}
            stored = {int(s) for s in self.redis.hkeys(keys.ops(POOL, record.id))}
            assert stored == live
            for seq in model.accepted:
                answered = self.redis.get(keys.result(request_id(record.id, seq))) is not None
                assert answered == (seq <= model.done or seq in model.dead)
                if seq > model.done and seq not in model.dead:
                    queued[record.tenant][0] += 1
                    queued[record.tenant][1] += model.accepted[seq][2]
        for tenant, (ops, tokens) in queued.items():
            row = self.redis.hgetall(keys.queue(POOL, TenantId(tenant)))
            assert int(row.get(b"ops", 0)) == ops
            assert int(row.get(b"tokens", 0)) == tokens

    @invariant()
    def every_spooled_body_in_need_is_referenced_once(self) -> None:
        references = 0
        for record in self.records:
            for seq, envelope in self.redis.hgetall(keys.ops(POOL, record.id)).items():
                kind, *_, ref = envelope.decode().split("|")
                done = self.models[self.number(record.id)].done
                released = kind == "forward" and int(seq) <= done
                references += ref.startswith("spool:") and not released
        stored = self.redis.hvals(keys.spool_segment_refs())
        assert sum(int(count) for count in stored) == references

    @invariant()
    def the_log_reaches_back_to_the_older_snapshot(self) -> None:
        for model, record in zip(self.models, self.records, strict=True):
            position = self.execution.position(record.id)
            assert position is not None
            assert (position.snap, position.cut) == (model.snap, model.cut)
            assert position.older_snap == position.cut
            assert position.older_file == ("" if model.cut < 0 else f"f{model.cut}")
            ops = self.execution.logged_ops(record.id, position.older_snap + 1, position.done)
            assert [op.seq for op in ops] == list(range(position.cut + 1, position.done + 1))

    def number(self, run: str) -> int:
        return int(run[1])

    @override
    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.wait(self.async_redis.aclose())
            self.loop.close()
            self.redis.close()
            self.spool.close()
            self.folder.cleanup()


def test_the_log_behaves_like_its_model(redis_server: EmbeddedRedis) -> None:
    LogMachine.server = redis_server
    run_state_machine_as_test(
        LogMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
