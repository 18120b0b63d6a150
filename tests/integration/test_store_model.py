"""The scripts against a plain model of the log, step by step, on a real Redis (hypothesis)."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool, new_writer
from cotrain_store.errors import Fenced, PlanOutdated, Reason, RunClosed, SeqConflict
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import SessionId, TenantId, WeightsRef, WorkerId, request_id, run_id
from cotrain_store.messages.ops import PASSES, OpKind, Step
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.intake import MAX_SEQ_GAP, Intake
from cotrain_store.redis_client.connection import open_connection, open_sync_connection
from cotrain_store.results.delivery_log import DeliveryLog
from cotrain_store.tenants.quotas import Quotas
from tests.support.draws import examples
from tests.support.limits import always
from tests.support.log_model import MANY, RunModel, halves
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.stack import MODEL, POOL, pool_record_for_tests

RUNS = 3
WORKERS = (WorkerId("w0"), WorkerId("w1"))
KINDS = st.sampled_from([*PASSES, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.LOAD])


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
        self.intake = Intake(self.async_redis, self.spool, always(Quotas(ops=10_000)))
        self.deliveries = DeliveryLog(self.async_redis)
        self.dispatch = Dispatch(self.async_redis, "scheduler-0")
        assert self.wait(self.dispatch.lead())
        self.workers = {worker: self.new_worker(worker) for worker in WORKERS}
        self.open: dict[WorkerId, list[Step]] = {worker: [] for worker in WORKERS}
        self.gave_up: dict[WorkerId, list[RunModel]] = {}
        self.cycle = 0
        self.models = [RunModel() for _ in range(RUNS)]
        self.records = [self.record(number) for number in range(RUNS)]
        for model, record in zip(self.models, self.records, strict=True):
            self.wait(self.intake.create_run(record))
            model.accepted[0] = ("", OpKind.CREATE, 0)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def new_worker(self, worker: WorkerId) -> Execution:
        execution = Execution(self.redis, self.spool, self.spool, POOL, worker)
        epoch = execution.claim()
        execution.publish(pool_record_for_tests())
        beat = WorkerHeartbeat(worker, epoch, "serving", "cpu", 1.0, 0, 0, 0.0)
        self.redis.set(redis_keys.worker(POOL, worker), json.dumps(asdict(beat)))
        return execution

    def of(self, model: RunModel) -> Execution:
        """Find the worker of a run, or one of those that may have it."""
        return self.workers[model.worker or min(self.workers)]

    def record(self, number: int) -> RunRecord:
        session = SessionId(f"s{number}")
        return RunRecord(
            run_id(session, 0), TenantId(f"t{number % 2}"), session, POOL, MODEL,
            LoraSpec(rank=1, seed=0), time.time(),
        )  # fmt: skip

    @rule(
        number=st.integers(0, RUNS - 1),
        ahead=st.sampled_from([0, 0, 0, 0, -1, 1, 3]),
        kind=KINDS,
        content=st.sampled_from(["x", "y"]),
        large=st.booleans(),
    )
    def submit(self, number: int, ahead: int, kind: OpKind, content: str, large: bool) -> None:
        model, record = self.models[number], self.records[number]
        missing = next(seq for seq in itertools.count(1) if seq not in model.accepted)
        seq = max(1, missing + ahead)
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
            if seq == model.next:
                model.given_up = set()

    @rule(number=st.integers(0, RUNS - 1))
    def submit_far_ahead(self, number: int) -> None:
        model, record = self.models[number], self.records[number]
        far = model.done + MAX_SEQ_GAP + 1
        expected = Reason.RUN_CLOSED if model.closed else Reason.SEQ_TOO_FAR
        with refused(expected):
            self.wait(self.intake.submit(record, far, OpKind.FORWARD, b"", 1, "z"))

    @rule(most=st.integers(1, 6), worker=st.sampled_from(WORKERS))
    def plan(self, most: int, worker: WorkerId) -> None:
        queues = self.wait(self.dispatch.ready(POOL))
        for queue in queues:
            model = self.models[self.number(queue.run)]
            assert queue.worker == model.worker
            tokens, process = model.begun
            is_open = queue.worker and self.workers[queue.worker].writer == process
            is_next = model.next == model.done + 1  # not planned again
            assert queue.done_tokens == (tokens if is_open and is_next else 0)
        if self.open[worker] or worker not in self.workers:
            return
        ready = {queue.run for queue in queues}
        for model, record in zip(self.models, self.records, strict=True):
            can_go_on = not model.closed and model.next in model.accepted
            assert (record.id in ready) == can_go_on
        mine = [queue for queue in queues if queue.worker in (None, worker)]
        ops = [op for queue in mine for op in runnable_prefix(queue.ops)[:most]]
        if not ops:
            return
        tenants = {record.id: record.tenant for record in self.records}
        step = Step(self.cycle + 1, worker, tuple(ops), time.time(), tenants)
        self.wait(self.dispatch.plan(POOL, step))
        self.cycle += 1
        self.open[worker] = [step]
        for op in ops:
            model = self.models[self.number(op.run)]
            model.worker = worker
            assert op.seq == model.next  # no run reordered, no gap skipped
            model.next += 1

    @rule(worker=st.sampled_from(WORKERS))
    def plan_of_the_past_is_refused(self, worker: WorkerId) -> None:
        for step in self.open[worker]:
            again = Step(self.cycle + 1, worker, step.ops, 0.0, step.tenant_by_run)
            with pytest.raises(PlanOutdated):
                self.wait(self.dispatch.plan(POOL, again))

    @rule(number=st.integers(0, RUNS - 1), kind=KINDS)
    def go_on(self, number: int, kind: OpKind) -> None:
        """Accept the next op of a run, plan it and commit it, where nothing stands in the way."""
        model = self.models[number]
        if not model.closed:
            self.submit(number, 0, kind, "x", large=True)
        worker = model.worker or min(self.workers)
        self.plan(6, worker)
        for step in list(self.open[worker]):
            self.commit_step(worker, step, twice=False)

    @rule(
        number=st.integers(0, RUNS - 1),
        kind=st.sampled_from(PASSES),
        finished=st.sampled_from([0, 0, 1]),
        closes=st.sampled_from([False, False, True]),
        twice=st.booleans(),
        is_replaced=st.booleans(),
    )
    def leave_open(
        self, number: int, kind: OpKind, finished: int, closes: bool, twice: bool, is_replaced: bool
    ) -> None:
        """Accept a pass, plan it, and commit a step in which it did not end; its run may end there."""
        model = self.models[number]
        if not model.closed:
            self.submit(number, 0, kind, "x", large=True)
        worker = model.worker or min(self.workers)
        self.plan(6, worker)
        if closes and self.open[worker]:
            self.close(number)
        if is_replaced:
            self.replace_worker(worker)
        for step in list(self.open[worker]):
            self.commit_step(worker, step, twice=twice, finished=finished)

    @precondition(lambda self: any(self.open.values()))
    @rule(twice=st.booleans(), finished=st.sampled_from([MANY, MANY, 0, 1, 2]), which=st.randoms(use_true_random=False))
    def commit(self, twice: bool, finished: int, which: Any) -> None:
        worker = which.choice([worker for worker in WORKERS if self.open[worker]])
        assert self.workers[worker].open_steps() == self.open[worker]
        step = which.choice(self.open[worker])
        self.commit_step(worker, step, twice=twice, finished=finished)

    def commit_step(self, worker: WorkerId, step: Step, *, twice: bool, finished: int = MANY) -> None:
        """Commit `finished` ops of each run and those before its next pass. The rest returns to the queue."""
        self.open[worker].remove(step)
        execution, (results, opened) = self.workers[worker], halves(step, finished)
        cycle, counted = {"cycle": step.cycle}, {"cycles": 1}
        execution.commit(step, results, cycle, counted, opened=opened)
        event("committed")
        for run, seq in results:
            model = self.models[self.number(run)]
            model.done, model.begun = seq, (0, "")
            if seq not in model.rejected:
                model.unread[seq] = len(results[run, seq].payload)
        for (run, seq), tokens in opened.items():
            event(f"put back; its run has ended: {self.models[self.number(run)].closed}")
            self.models[self.number(run)].put_back(seq, tokens, execution.writer)
        if twice:
            self.plan(6, worker)  # a commit that comes again must not take this back
            execution.commit(step, results, cycle, counted, opened=opened)

    @precondition(lambda self: any(model.unread for model in self.models))
    @rule(which=st.randoms(use_true_random=False), twice=st.booleans())
    def send(self, which: Any, twice: bool) -> None:
        number = which.choice([n for n in range(RUNS) if self.models[n].unread])
        model, record = self.models[number], self.records[number]
        seq = which.choice(sorted(model.unread))
        del model.unread[seq]
        for _ in range(1 + twice):
            self.deliveries.sent(record.tenant, request_id(record.id, seq), POOL, 0.0)
            self.wait(self.deliveries.flush())

    def refuse(self, old: Execution, steps: list[Step]) -> None:
        """Check that a replaced process is fenced in every call."""
        for step, finished in itertools.product(steps, (MANY, 0)):
            results, opened = halves(step, finished)
            with pytest.raises(Fenced):
                old.commit(step, results, {}, {}, opened=opened)
        with pytest.raises(Fenced):
            old.register_snapshot(self.records[0].id, 0, "f", "s")
        with pytest.raises(Fenced):
            old.roll_back(self.checkpoint(0), "f", "s")

    @rule(which=st.randoms(use_true_random=False))
    def a_replaced_worker_writes_nothing(self, which: Any) -> None:
        self.replace_worker(which.choice(sorted(self.workers)))

    def replace_worker(self, worker: WorkerId) -> None:
        old = self.workers[worker]
        self.workers[worker] = self.new_worker(worker)
        self.refuse(old, self.open[worker])
        assert self.workers[worker].open_steps() == self.open[worker]

    @precondition(lambda self: len(self.workers) > 1)
    @rule(worker=st.sampled_from(WORKERS))
    def reassign(self, worker: WorkerId) -> None:
        zombie = self.workers.pop(worker)
        [heir] = self.workers
        self.redis.delete(redis_keys.worker(POOL, worker))
        [place] = [p for p in self.wait(self.dispatch.view(POOL)).slots if p.worker == worker]
        assert self.wait(self.dispatch.reassign(POOL, place, heir))
        event(f"reassigned with {len(self.open[worker])} open steps")
        self.refuse(zombie, self.open[worker])
        for step in self.open[worker]:
            for op in step.ops:
                self.models[self.number(op.run)].worker = heir
        moved = [replace(step, worker=heir) for step in self.open[worker]]
        self.open[heir] = sorted(self.open[heir] + moved, key=lambda step: step.cycle)
        self.open[worker] = []
        self.gave_up[worker] = [m for m in self.models if m.worker == worker]
        for model in self.gave_up[worker]:
            model.worker = None

    @precondition(lambda self: len(self.workers) < len(WORKERS))
    @rule()
    def come_back(self) -> None:
        [worker] = set(WORKERS) - set(self.workers)
        self.workers[worker] = self.new_worker(worker)
        assert self.workers[worker].open_steps() == []
        for model in self.gave_up.pop(worker):
            model.worker = model.worker or worker  # nobody else took it

    def checkpoint(self, number: int) -> CheckpointRecord:
        run = self.records[number]
        weights = WeightsRef(f"{run.id}:0")
        return CheckpointRecord(run.id, run.tenant, "weights", "x", weights, MODEL, 0.0)

    @precondition(lambda self: any(model.done >= 0 for model in self.models))
    @rule(which=st.randoms(use_true_random=False))
    def roll_back(self, which: Any) -> None:
        number = which.choice([n for n in range(RUNS) if self.models[n].done >= 0])
        model, record = self.models[number], self.records[number]
        model.rollbacks += 1
        file = f"back {model.done}"
        assert self.of(model).roll_back(self.checkpoint(number), file, "sha") == model.rollbacks
        event("rolled back")
        model.begun = (0, "")
        model.snap = model.cut = model.done
        model.older_file = ""
        model.rejected |= {seq for seq in model.accepted if seq > model.done} - model.dead
        for worker, steps in self.open.items():
            if any(op.run == record.id for step in steps for op in step.ops):
                self.open[worker] = self.workers[worker].open_steps()
                rejected = [op for step in self.open[worker] for op in step.ops if op.run == record.id]
                assert {op.kind for op in rejected} == {OpKind.REJECTED}

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

    @rule(number=st.integers(0, RUNS - 1), back=st.sampled_from([0, 0, 0, 1, 2]))
    def snapshot(self, number: int, back: int) -> None:
        model, record = self.models[number], self.records[number]
        seq = model.done - back
        before = self.of(model).logs.position(record.id)
        assert before is not None
        file = f"f{seq}"
        registered = self.of(model).register_snapshot(record.id, seq, file, "sha")
        is_again = seq == model.snap >= 0 and before.snapshot_file != file
        assert registered == (is_again or model.snap < seq <= model.done)
        if registered and not is_again:
            event("snapshot registered")
            model.older_file = before.snapshot_file
            model.cut, model.snap = model.snap, seq

    @rule(number=st.integers(0, RUNS - 1))
    def give_up(self, number: int) -> None:
        model, record = self.models[number], self.records[number]
        self.wait(self.dispatch.expire_gap(POOL, record.id, record.tenant))
        behind = {seq for seq in model.accepted if seq > model.next}
        if behind and model.next not in model.accepted and not model.closed:
            event("gave up")
            model.given_up = behind
            model.rejected |= behind

    @rule(number=st.integers(0, RUNS - 1))
    def close(self, number: int) -> None:
        model, record = self.models[number], self.records[number]
        self.wait(self.intake.close_run(record))
        if not model.closed:
            event("run closed")
            model.closed = True
            model.begun = (0, "")
            model.given_up = set()
            model.dead = {seq for seq in model.accepted if seq >= model.next}

    @invariant()
    def the_log_equals_the_model(self) -> None:
        queued: dict[str, list[int]] = {"t0": [0, 0], "t1": [0, 0]}
        for model, record in zip(self.models, self.records, strict=True):
            row = self.redis.hgetall(redis_keys.log(POOL, record.id))
            assert int(row[b"next"]) == model.next
            assert int(row[b"done"]) == model.done
            assert model.worker == (row.get(b"worker", b"").decode() or None) or (
                model.worker is None and row[b"worker"].decode() not in self.workers
            )
            assert model.snap <= model.done < model.next or model.next == model.done + 1
            live = {s for s in model.accepted if s > model.cut and s not in model.dead}
            stored = {int(s) for s in self.redis.hkeys(redis_keys.ops(POOL, record.id))}
            assert stored == live
            for seq in model.accepted:
                answered = self.redis.get(redis_keys.result(request_id(record.id, seq))) is not None
                assert answered == (seq <= model.done or seq in model.dead | model.rejected)
                if seq > model.done and seq not in model.dead | model.given_up:
                    queued[record.tenant][0] += 1
                    queued[record.tenant][1] += (seq not in model.rejected) * model.accepted[seq][2]
        for tenant, (ops, tokens) in queued.items():
            row = self.redis.hgetall(redis_keys.queue(POOL, TenantId(tenant)))
            assert int(row.get(b"ops", 0)) == ops
            assert int(row.get(b"tokens", 0)) == tokens

    @invariant()
    def every_spooled_body_in_need_is_referenced_once(self) -> None:
        references = 0
        for record in self.records:
            for seq, envelope in self.redis.hgetall(redis_keys.ops(POOL, record.id)).items():
                kind, *_, ref = envelope.decode().split("|")
                done = self.models[self.number(record.id)].done
                released = kind == "forward" and int(seq) <= done
                references += ref.startswith("spool:") and not released
        stored = self.redis.hvals(redis_keys.spool_segment_refs())
        assert sum(int(count) for count in stored) == references

    @invariant()
    def the_log_reaches_back_to_the_older_snapshot(self) -> None:
        for model, record in zip(self.models, self.records, strict=True):
            execution = self.of(model)
            position = execution.logs.position(record.id)
            assert position is not None
            assert (position.snap, position.older_snap) == (model.snap, model.cut)
            assert position.older_file == model.older_file
            assert position.weights_epoch == model.rollbacks
            ops = execution.logs.logged_ops(record.id, position.older_snap + 1, position.done)
            assert [op.seq for op in ops] == list(range(position.older_snap + 1, position.done + 1))

    @invariant()
    def unread_results_are_counted_to_the_byte(self) -> None:
        for tenant in {record.tenant for record in self.records}:
            unread = {
                request_id(record.id, seq).encode(): size
                for model, record in zip(self.models, self.records, strict=True)
                for seq, size in model.unread.items()
                if record.tenant == tenant
            }
            row = {name: int(size) for name, size in self.redis.hgetall(redis_keys.unread(tenant)).items()}
            assert row.pop(b"bytes", 0) == sum(unread.values())
            assert row == unread
            assert set(self.redis.zrange(redis_keys.unread_until(tenant), 0, -1)) == unread.keys()

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
        LogMachine, settings=settings(max_examples=examples(24, at_least=8), stateful_step_count=40, deadline=None)
    )
